//! The spec of a kernel: everything that its code depends on.

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use fa3_ir::{BuildKernel, Kernel};

/// A spec of a kernel. Equal specs build the same kernel.
pub trait KernelSpec: Any + fmt::Debug + Eq + Hash + Send + Sync {
    /// Builds the kernel.
    fn kernel(&self) -> Kernel;
}

/// The [`KernelSpec`] of any operation, for a program's steps and the cache of compiled kernels. Launches of equal
/// specs share a kernel. A clone shares the [`KernelSpec`].
#[derive(Clone)]
pub struct Spec(Arc<dyn Key>);

/// A [`KernelSpec`] with its type erased.
trait Key: Any + fmt::Debug + Send + Sync {
    fn kernel(&self) -> Kernel;
    fn is(&self, other: &Spec) -> bool;
    fn hash(&self, state: &mut dyn Hasher);
}

impl<T: KernelSpec> Key for T {
    fn kernel(&self) -> Kernel {
        KernelSpec::kernel(self)
    }

    fn is(&self, other: &Spec) -> bool {
        other.downcast_ref() == Some(self)
    }

    fn hash(&self, mut state: &mut dyn Hasher) {
        Hash::hash(self, &mut state);
    }
}

impl Spec {
    /// Builds the kernel.
    pub fn kernel(&self) -> Kernel {
        self.0.kernel()
    }

    /// The spec, if its type is `T`.
    pub fn downcast_ref<T: KernelSpec>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }
}

impl BuildKernel for Spec {
    fn build(&self) -> Kernel {
        self.kernel()
    }
}

impl<T: KernelSpec> From<T> for Spec {
    fn from(spec: T) -> Spec {
        Spec(Arc::new(spec))
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for Spec {
    fn eq(&self, other: &Spec) -> bool {
        self.0.is(other)
    }
}

impl Eq for Spec {}

impl Hash for Spec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fa3_ir::Launch;

    use super::*;

    #[derive(Debug, PartialEq, Eq, Hash)]
    struct One(u32);

    #[derive(Debug, PartialEq, Eq, Hash)]
    struct Other(u32);

    impl KernelSpec for One {
        fn kernel(&self) -> Kernel {
            Kernel::build("one", Launch::threads(32 * self.0), |_| {})
        }
    }

    impl KernelSpec for Other {
        fn kernel(&self) -> Kernel {
            Kernel::build("other", Launch::threads(32 * self.0), |_| {})
        }
    }

    #[test]
    fn specs_are_equal_if_type_and_value_are() {
        let specs = [Spec::from(One(1)), One(2).into(), Other(1).into()];
        let kept: HashSet<Spec> = specs.iter().cloned().chain([One(1).into()]).collect();
        assert_eq!(kept.len(), 3);
        assert!(specs.iter().all(|spec| kept.contains(spec)));
        assert_eq!(specs.map(|spec| spec.kernel().name), ["one", "one", "other"]);
    }

    #[test]
    fn a_spec_gives_back_its_description() {
        let spec = Spec::from(One(3));
        assert_eq!(spec.downcast_ref(), Some(&One(3)));
        assert_eq!(spec.downcast_ref::<Other>(), None);
        assert_eq!(format!("{spec:?}"), "One(3)");
    }
}
