//! Setters of builders.

/// Defines setters: methods that take a builder and return it with other values in some fields.
///
/// ```
/// #[must_use]
/// pub struct Options {
///     cap: Option<f64>,
/// }
///
/// impl Options {
///     fa3_types::setters! {
///         /// Sets the soft cap.
///         softcap(cap: f64) { cap: Some(cap) }
///     }
/// }
/// assert_eq!(Options { cap: None }.softcap(30.0).cap, Some(30.0));
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($(
        $(#[$doc:meta])*
        $name:ident($($argument:ident: $type:ty),*) { $($field:ident $(: $value:expr)?),+ }
    )+) => {$(
        $(#[$doc])*
        #[allow(clippy::needless_update, reason = "a builder may have no other field")]
        pub fn $name(self, $($argument: $type),*) -> Self {
            Self { $($field $(: $value)?,)+ ..self }
        }
    )+};
}
