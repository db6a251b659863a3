//! Values that threads look up by key and use one at a time.
//!
//! A stream's cached workspace is such a value. The stream runs kernels in the order in which they were put on it. But
//! a call may be several kernels that pass data in the workspace, so calls of two threads must not interleave their
//! kernels on the stream.

use std::collections::HashMap;
use std::hash::Hash;

// The tests run random schedules of a few threads, which a model checker draws.
#[cfg(test)]
use shuttle::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(test))]
use std::sync::{Arc, Mutex, MutexGuard};

/// A slot for a value that is made once. Its lock is held while the value is made or used.
type Slot<V> = Arc<Mutex<Option<V>>>;

/// Values by keys. Each is made at its first use, and used by one thread at a time.
#[derive(Debug)]
pub struct KeyedMutex<K, V>(Mutex<HashMap<K, Slot<V>>>);

/// A value of [`KeyedMutex`], which other threads may hold as well.
#[derive(Debug)]
pub struct Lease<V>(Slot<V>);

impl<K, V> Default for KeyedMutex<K, V> {
    fn default() -> KeyedMutex<K, V> {
        KeyedMutex(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash, V> KeyedMutex<K, V> {
    /// The value of `key`. If it does not exist yet, `make` makes it. Threads with other keys do not wait for it.
    ///
    /// # Errors
    /// The error of `make`. The next call with this key makes the value again.
    pub fn find<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<Lease<V>, E> {
        let slot = Arc::clone(lock(&self.0).entry(key).or_default());
        let mut value = lock(&slot);
        if value.is_none() {
            *value = Some(make()?);
        }
        drop(value);
        Ok(Lease(slot))
    }

    /// Whether the value of `key` is made, or is being made.
    pub fn has(&self, key: &K) -> bool {
        lock(&self.0).get(key).is_some_and(|slot| slot.try_lock().map_or(true, |value| value.is_some()))
    }
}

impl<K, V: Clone> KeyedMutex<K, V> {
    /// The values that are made and that no thread uses at the moment.
    pub fn values(&self) -> Vec<V> {
        let slots: Vec<Slot<V>> = lock(&self.0).values().cloned().collect();
        slots.iter().filter_map(|slot| slot.try_lock().ok()?.clone()).collect()
    }
}

impl<V> Lease<V> {
    /// Calls `work` with the value. Until it returns, other threads that ask for the value wait. So `work` must not
    /// wait for such a thread, nor ask for the value again.
    #[allow(clippy::missing_panics_doc, reason = "it has found a value")]
    pub fn with<R>(&self, work: impl FnOnce(&mut V) -> R) -> R {
        work(lock(&self.0).as_mut().expect("a value that was found is made"))
    }
}

/// Locks a mutex, even if it is poisoned. After a panic a map still has its values, and a slot has its value or none.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use shuttle::{check_random, thread};

    use super::*;

    /// Kernels in the order of a stream: the thread that made the call, and the kernel's number in the call.
    type Queue = Arc<Mutex<Vec<(usize, usize)>>>;

    /// Runs calls of two threads. Each call is three kernels, and `put` puts them on the stream.
    fn queue_of_two_threads(put: impl Fn(&Queue, usize) + Clone + Send + 'static) -> Vec<(usize, usize)> {
        let queue = Queue::default();
        let threads = [0, 1].map(|caller| {
            let (queue, put) = (Arc::clone(&queue), put.clone());
            thread::spawn(move || put(&queue, caller))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let queue = lock(&queue);
        queue.clone()
    }

    fn launch(queue: &Queue, caller: usize) {
        (0..3).for_each(|kernel| lock(queue).push((caller, kernel)));
    }

    fn is_call_by_call(queue: &[(usize, usize)]) -> bool {
        queue.chunks(3).all(|call| call.iter().map(|(caller, _)| caller).eq([&call[0].0; 3]))
    }

    #[test]
    fn calls_that_share_a_value_are_not_mixed() {
        check_random(
            || {
                let kept = Arc::new(KeyedMutex::<u64, ()>::default());
                let queue = queue_of_two_threads(move |queue, caller| {
                    let Ok(held) = kept.find(7, || Ok::<_, Infallible>(()));
                    held.with(|()| launch(queue, caller));
                });
                assert!(is_call_by_call(&queue), "{queue:?}");
            },
            300,
        );
    }

    /// Random schedules mix the kernels of calls that do not hold a value.
    #[test]
    #[should_panic(expected = "mixed")]
    fn calls_that_hold_nothing_are_mixed() {
        check_random(|| assert!(is_call_by_call(&queue_of_two_threads(launch)), "mixed"), 300);
    }

    #[test]
    fn a_value_is_made_once() {
        check_random(
            || {
                let kept = Arc::new(KeyedMutex::<u64, usize>::default());
                let made = Arc::new(Mutex::new(0));
                let queue = queue_of_two_threads({
                    let (kept, made) = (Arc::clone(&kept), Arc::clone(&made));
                    move |queue, caller| {
                        let make = || {
                            *lock(&made) += 1;
                            Ok::<_, Infallible>(caller)
                        };
                        let Ok(held) = kept.find(7, make);
                        held.with(|maker| lock(queue).push((caller, *maker)));
                    }
                });
                assert_eq!((*lock(&made), queue[0].1), (1, queue[1].1));
            },
            300,
        );
    }

    #[test]
    fn a_value_that_could_not_be_made_is_made_again() {
        check_random(
            || {
                let kept = KeyedMutex::<u64, u64>::default();
                assert_eq!(kept.find(7, || Err("no memory")).err(), Some("no memory"));
                assert!(!kept.has(&7) && !kept.has(&8) && kept.values().is_empty());
                assert_eq!(kept.find(7, || Ok::<_, &str>(5)).map(|held| held.with(|value| *value)), Ok(5));
                assert!(kept.has(&7));
                assert_eq!(kept.values(), [5]);
            },
            1,
        );
    }
}
