//! A map that does not grow without end.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// The values of the last so many keys that were put there. Getting a value does not make it younger, so
/// that it stays a look-up.
#[derive(Debug)]
pub(crate) struct Kept<K, V> {
    most: usize,
    values: HashMap<K, V>,
    /// The keys, oldest first.
    keys: VecDeque<K>,
}

impl<K: Clone + Eq + Hash, V> Kept<K, V> {
    /// Nothing yet, and never more than `most`.
    pub(crate) fn new(most: usize) -> Kept<K, V> {
        Kept { most, values: HashMap::new(), keys: VecDeque::new() }
    }

    /// The value of `key`, if it is there.
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.values.get(key)
    }

    /// Puts a value there, or replaces that of an equal key, which stays as old as it was. The oldest
    /// goes if there is no room.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.values.insert(key.clone(), value).is_some() {
            return;
        }
        self.keys.push_back(key);
        if self.keys.len() > self.most
            && let Some(oldest) = self.keys.pop_front()
        {
            self.values.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(kept: &Kept<u32, &str>) -> Vec<u32> {
        assert_eq!(kept.values.len(), kept.keys.len());
        (0..10).filter(|key| kept.get(key).is_some()).collect()
    }

    #[test]
    fn only_the_oldest_makes_room() {
        let mut kept = Kept::new(3);
        for key in 0..7 {
            kept.insert(key, "first");
            assert_eq!(keys(&kept), (key.saturating_sub(2)..=key).collect::<Vec<_>>());
        }
        assert_eq!((kept.get(&3), kept.get(&4)), (None, Some(&"first")));
        // One that went may come again.
        kept.insert(3, "second");
        assert_eq!(keys(&kept), [3, 5, 6]);
    }

    #[test]
    fn an_equal_key_takes_no_room_of_others() {
        let mut kept = Kept::new(2);
        for (key, value) in [(1, "first"), (2, "first"), (1, "second"), (1, "third")] {
            kept.insert(key, value);
        }
        assert_eq!((kept.get(&1), kept.get(&2)), (Some(&"third"), Some(&"first")));
        kept.insert(3, "first");
        assert_eq!(keys(&kept), [2, 3]);
    }
}
