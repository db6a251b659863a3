//! Catches panics. No other language may get them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of some work, or the message of its panic.
///
/// # Errors
/// The panic's message.
pub fn caught<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    // A panic may leave two kinds of state behind: the caller's tensors, which may then hold any numbers, and values
    // behind locks, each of which changes in one step.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let literal = panic.downcast_ref::<&str>().map(|message| (*message).to_owned());
    let message = literal.or_else(|| panic.downcast_ref::<String>().cloned());
    message.unwrap_or_else(|| "a panic without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::panic::{panic_any, resume_unwind};

    use super::*;

    #[test]
    fn panics_become_their_messages() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(caught::<()>(|| resume_unwind(Box::new("a literal"))), Err("a literal".to_owned()));
        let numbers: Vec<i32> = Vec::new();
        assert_eq!(
            caught(|| numbers[2]),
            Err("index out of bounds: the len is 0 but the index is 2".to_owned())
        );
        assert_eq!(caught::<()>(|| panic_any(5)), Err("a panic without a message".to_owned()));
    }

    #[test]
    fn panics_of_other_threads_are_caught_where_they_are_waited_for() {
        let joined = caught(|| rayon::join(|| (), || panic!("from {}", "there")));
        assert_eq!(joined, Err("from there".to_owned()));
    }
}
