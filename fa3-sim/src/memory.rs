//! Global memory: separate allocations, in which every byte is either written or not.

/// Global memory. Addresses are plain numbers, aligned to 256, never 0; no two allocations touch.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(crate) allocations: Vec<Allocation>,
}

/// An allocation: a handle into the [`Memory`] that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) index: usize,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// The address of its first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// Byte of unwritten memory: NaN in every floating-point type.
pub(crate) const POISON: u8 = 0xFF;

/// The first address.
const START: u64 = 1 << 20;
/// Smallest number of unmapped bytes between allocations.
const REDZONE: u64 = 4096;

/// State of a byte, as flags.
pub(crate) mod state {
    /// The byte holds a value.
    pub(crate) const VALID: u8 = 1;
    /// The kernel wrote the byte, once.
    pub(crate) const WRITTEN: u8 = 2;
    /// The kernel added to the byte, in any order.
    pub(crate) const REDUCED: u8 = 4;
}

/// How often kernels must write the bytes of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Any number of times.
    None,
    /// Every kernel writes each byte exactly once.
    Once,
    /// The next kernel writes each byte at most once, and no byte that earlier kernels have written.
    Part,
    /// The next kernel writes exactly the bytes that earlier kernels have not written.
    Rest,
}

#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub(crate) name: String,
    pub(crate) address: u64,
    pub(crate) bytes: Vec<u8>,
    /// Bits of [`state`] for each byte.
    pub(crate) state: Vec<u8>,
    /// How often its bytes must be written.
    pub(crate) demand: Demand,
}

/// A range of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GlobalPlace {
    pub(crate) allocation: usize,
    pub(crate) offset: usize,
}

impl Memory {
    /// Empty memory.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// Allocates `bytes` bytes that hold nothing: reading them before a write is a finding ([`crate::Rule::I1`]).
    pub fn alloc(&mut self, name: &str, bytes: usize) -> Buffer {
        self.push(name, vec![POISON; bytes], 0)
    }

    /// Allocates memory that holds `bytes`.
    pub fn alloc_from(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.push(name, bytes.to_vec(), state::VALID)
    }

    fn push(&mut self, name: &str, bytes: Vec<u8>, state: u8) -> Buffer {
        let end =
            self.allocations.last().map_or(START - REDZONE, |last| last.address + last.bytes.len() as u64);
        let address = (end + REDZONE).next_multiple_of(256);
        let buffer = Buffer { index: self.allocations.len(), address, bytes: bytes.len() };
        let state = vec![state; bytes.len()];
        self.allocations.push(Allocation {
            name: name.to_owned(),
            address,
            bytes,
            state,
            demand: Demand::None,
        });
        buffer
    }

    /// The bytes of an allocation. Bytes that were never written are 0xFF.
    ///
    /// # Panics
    /// If `buffer` belongs to another memory.
    pub fn read(&self, buffer: Buffer) -> Vec<u8> {
        self.allocations[buffer.index].bytes.clone()
    }

    /// For each byte of an allocation, whether the last kernel wrote it or added to it.
    ///
    /// # Panics
    /// If `buffer` belongs to another memory.
    pub fn written(&self, buffer: Buffer) -> Vec<bool> {
        let touched = state::WRITTEN | state::REDUCED;
        self.allocations[buffer.index].state.iter().map(|state| state & touched != 0).collect()
    }

    /// Requires that every kernel writes every byte of `buffer` exactly once, or adds to it (rule [`crate::Rule::I1`]).
    ///
    /// # Panics
    /// If `buffer` belongs to another memory.
    pub fn expect_written_once(&mut self, buffer: Buffer) {
        self.allocations[buffer.index].demand = Demand::Once;
    }

    /// Sets the demand on the next kernel's writes to a buffer.
    pub(crate) fn demand(&mut self, buffer: Buffer, demand: Demand) {
        self.allocations[buffer.index].demand = demand;
    }

    /// Whether a buffer is one of this memory's allocations, judged by address and size.
    pub(crate) fn owns(&self, buffer: Buffer) -> bool {
        let like = |own: &Allocation| (own.address, own.bytes.len()) == (buffer.address, buffer.bytes);
        self.allocations.get(buffer.index).is_some_and(like)
    }

    /// Forgets which bytes earlier kernels wrote, because these kernels are complete. Buffers that a program writes in
    /// parts are an exception.
    pub(crate) fn begin(&mut self) {
        let forgotten =
            |allocation: &&mut Allocation| !matches!(allocation.demand, Demand::Part | Demand::Rest);
        for allocation in self.allocations.iter_mut().filter(forgotten) {
            allocation.state.iter_mut().for_each(|state| *state &= state::VALID);
        }
    }

    /// The place of `bytes` bytes at `address`. If the bytes are in no allocation, returns the nearest allocation
    /// below, and the offset from it.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<GlobalPlace, Option<(usize, u64)>> {
        let after = self.allocations.partition_point(|allocation| allocation.address <= address);
        let Some(allocation) = after.checked_sub(1) else { return Err(None) };
        let offset = address - self.allocations[allocation].address;
        if offset.saturating_add(bytes) > self.allocations[allocation].bytes.len() as u64 {
            return Err(Some((allocation, offset)));
        }
        Ok(GlobalPlace { allocation, offset: offset as usize })
    }
}

impl Allocation {
    pub(crate) fn is_valid(&self, offset: usize, bytes: usize) -> bool {
        self.state[offset..offset + bytes].iter().all(|state| state & state::VALID != 0)
    }

    /// Marks bytes as written. Returns whether some bytes were written before.
    pub(crate) fn mark(&mut self, offset: usize, bytes: usize, how: u8) -> bool {
        let mut again = false;
        for state in &mut self.state[offset..offset + bytes] {
            again |= *state & how & state::WRITTEN != 0;
            *state |= how | state::VALID;
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_resolve_to_allocations() {
        let mut memory = Memory::new();
        let (x, y) = (memory.alloc("x", 100), memory.alloc_from("y", &[1, 2, 3]));
        assert!(
            x.address() % 256 == 0 && y.address() % 256 == 0 && y.address() >= x.address() + 100 + REDZONE
        );
        assert_eq!(memory.locate(x.address() + 96, 4), Ok(GlobalPlace { allocation: 0, offset: 96 }));
        assert_eq!(memory.locate(x.address() + 97, 4), Err(Some((0, 97))));
        assert_eq!(memory.locate(y.address() - 1, 1), Err(Some((0, y.address() - 1 - x.address()))));
        assert_eq!(memory.locate(0, 1), Err(None));
        assert_eq!(memory.locate(u64::MAX, u64::MAX), Err(Some((1, u64::MAX - y.address()))));
        assert!(memory.allocations[1].is_valid(0, 3) && !memory.allocations[0].is_valid(0, 1));
    }
}
