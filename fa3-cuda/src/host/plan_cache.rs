//! A cache of plans.

use std::hash::Hash;
use std::num::NonZeroUsize;
#[cfg(not(test))]
use std::sync::{Arc, Mutex};

use lru::LruCache;

use super::keyed_mutex::lock;
// The tests run random schedules of threads, which a model checker draws.
#[cfg(test)]
use shuttle::sync::{Arc, Mutex};

/// Capacity of the cache, so that it does not grow without bound if a program's lengths never repeat.
const MOST: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// An LRU cache of values by keys, for a program that does not know its problems beforehand. A value is a
/// [`Compiled`](super::Compiled). Its key is everything that the plan depends on, including the device. The lock is
/// held for a moment only, never while a value is made.
///
/// Keys should be [canonical](fa3_types::TensorDesc::canonical), with rounded hints of lengths, because a plan depends
/// on nothing else.
#[derive(Debug)]
pub struct PlanCache<K: Eq + Hash, V>(Mutex<LruCache<K, Arc<V>>>);

impl<K: Eq + Hash, V> Default for PlanCache<K, V> {
    fn default() -> PlanCache<K, V> {
        PlanCache(Mutex::new(LruCache::new(MOST)))
    }
}

impl<K: Clone + Eq + Hash, V> PlanCache<K, V> {
    /// The value of a key, which is made at the first call. If there is no room, the least recently used value is
    /// dropped.
    ///
    /// # Errors
    /// Errors of making the value.
    pub fn find<E>(&self, key: &K, make: impl FnOnce(&K) -> Result<V, E>) -> Result<Arc<V>, E> {
        if let Some(value) = lock(&self.0).get(key) {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(make(key)?);
        // If another thread made this value meanwhile, either of the two will do.
        lock(&self.0).put(key.clone(), Arc::clone(&value));
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use shuttle::{check_random, thread};

    use super::*;

    /// Whether the value of a key had to be made.
    fn is_made(kept: &PlanCache<usize, usize>, key: usize) -> bool {
        let mut made = false;
        let value = kept.find(&key, |&key| {
            made = true;
            Ok::<_, ()>(key + 1)
        });
        assert_eq!(value.as_deref(), Ok(&(key + 1)));
        made
    }

    #[test]
    fn what_is_used_stays() {
        let check = || {
            let kept = PlanCache::default();
            for key in 0..3 * MOST.get() {
                assert!(is_made(&kept, key));
                assert!(!is_made(&kept, 0), "after {key} others");
            }
            // All other values were dropped in the order of their use.
            assert!(!is_made(&kept, 2 * MOST.get() + 1));
            assert!(is_made(&kept, 2 * MOST.get()));
        };
        check_random(check, 1);
    }

    #[test]
    fn what_cannot_be_made_is_not_kept() {
        let check = || {
            let kept = PlanCache::<usize, usize>::default();
            assert_eq!(kept.find(&1, |_| Err("no")), Err("no"));
            assert!(is_made(&kept, 1));
        };
        check_random(check, 1);
    }

    #[test]
    fn threads_find_what_others_made() {
        let check = || {
            let kept = Arc::new(PlanCache::default());
            let threads = [1, 1, 2].map(|key| {
                let kept = Arc::clone(&kept);
                thread::spawn(move || is_made(&kept, key))
            });
            let made = threads.map(|thread| thread.join().unwrap());
            assert!((made[0] || made[1]) && made[2]);
            assert!(!is_made(&kept, 1) && !is_made(&kept, 2));
        };
        check_random(check, 300);
    }
}
