//! Values that are kept between calls.

use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

/// As many values are kept. A program whose lengths never repeat makes them all the time, but does not grow.
const MOST: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// The values of the keys that were used last. It is locked for a moment only, never while a value is made.
pub(crate) struct Kept<K, V>(Mutex<LruCache<K, Arc<V>>>);

impl<K: Eq + Hash, V> Default for Kept<K, V> {
    fn default() -> Kept<K, V> {
        Kept(Mutex::new(LruCache::new(MOST)))
    }
}

impl<K: Clone + Eq + Hash, V> Kept<K, V> {
    /// The value of a key, made before or now. The value that was used longest ago goes if there is no room.
    ///
    /// # Errors
    /// The errors of making it.
    pub(crate) fn find<E>(&self, key: &K, make: impl FnOnce(&K) -> Result<V, E>) -> Result<Arc<V>, E> {
        if let Some(value) = lock(&self.0).get(key) {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(make(key)?);
        // If another thread made the same meanwhile, either will do.
        lock(&self.0).put(key.clone(), Arc::clone(&value));
        Ok(value)
    }
}

/// The value that a mutex protects.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left behind is a map of what was put there before.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the value of a key had to be made.
    fn is_made(kept: &Kept<usize, usize>, key: usize) -> bool {
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
        let kept = Kept::default();
        for key in 0..3 * MOST.get() {
            assert!(is_made(&kept, key));
            assert!(!is_made(&kept, 0), "after {key} others");
        }
        // All others went in the order of their use.
        assert!(!is_made(&kept, 2 * MOST.get() + 1));
        assert!(is_made(&kept, 2 * MOST.get()));
    }

    #[test]
    fn what_cannot_be_made_is_not_kept() {
        let kept = Kept::<usize, usize>::default();
        assert_eq!(kept.find(&1, |_| Err("no")), Err("no"));
        assert!(is_made(&kept, 1));
    }
}
