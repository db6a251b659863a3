//! Enums of things that have names.

/// Declares an enum whose variants are displayed by their names; with `const ALL` also the list of its variants.
macro_rules! names {
    ($(#[$of_all:meta])* const ALL; $(#[$of_enum:meta])* pub enum $enum:ident {
        $($(#[$doc:meta])* $variant:ident = $name:literal,)+
    }) => {
        names! {
            $(#[$of_enum])*
            pub enum $enum {
                $($(#[$doc])* $variant = $name,)+
            }
        }

        impl $enum {
            $(#[$of_all])*
            pub const ALL: &[$enum] = &[$($enum::$variant),+];
        }
    };
    ($(#[$of_enum:meta])* pub enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$of_enum])*
        pub enum $enum {
            $($(#[$doc])* $variant,)+
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $($enum::$variant => $name,)+
                })
            }
        }
    };
}

pub(crate) use names;
