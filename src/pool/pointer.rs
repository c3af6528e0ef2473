//! The one pointer type and the one page type.
//!
//! A [`Pointer`] names a 4 KiB block, the epoch in which that block was written, and the CRC-32C of what must be
//! there. A [`Page`] is 256 pointers. Data, pages, node records and bitmaps are all reached through pointers, so
//! the pool is one Merkle tree of checksums and one walk serves everything.
//!
//! ```text
//! bit 127        96 95    88 87            48 47     40 39              0
//!     ┌────────────┬────────┬────────────────┬─────────┬────────────────┐
//!     │  crc32c 32 │ flags 8│    birth 40    │ vdev 8  │   index 40     │
//!     └────────────┴────────┴────────────────┴─────────┴────────────────┘
//! ```
//!
//! Stored little-endian. Block 0 is a hole: it reads as zeroes; its birth tells when it became one. Block 0 of
//! every device holds the label, so no live pointer can ever name it. The flags are zero in format 1.
#![forbid(unsafe_code)]

use std::fmt;

use zerocopy::little_endian::U128;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a block: the unit of allocation, of checksums and of the page tree.
pub const BLOCK_BYTES: usize = 4096;
/// Pointers in a page.
pub const FANOUT: usize = 256;
/// Levels of every page tree: level 0 is the leaf page, level 3 the root page.
pub const LEVELS: u32 = 4;
/// Bytes of a volume that one leaf page maps; the unit in which volumes are dealt over shards.
pub const CHUNK_BYTES: u64 = (BLOCK_BYTES * FANOUT) as u64;
/// Leaf pages that one tree can hold.
pub const LEAVES_MAX: u64 = 1 << (8 * (LEVELS - 1));

const INDEX_BITS: u32 = 40;
const BIRTH_BITS: u32 = 40;
const BIRTH_MASK: u128 = (1 << BIRTH_BITS) - 1;

/// The number of a moment between two snapshots of the pool; grows for ever, starts at 1. 0 = "before all".
pub type Epoch = u64;
/// The largest epoch a pointer can carry.
pub const EPOCH_MAX: Epoch = (1 << BIRTH_BITS) - 1;

/// A 4 KiB block of the pool: the vdev in the top 8 of 48 bits, its block number on that vdev below.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Block(u64);

impl Block {
    /// The hole.
    pub const HOLE: Block = Block(0);

    /// Block number `index` (of 4 KiB) on `vdev`.
    pub fn new(vdev: u8, index: u64) -> Block {
        assert!(index < 1 << INDEX_BITS, "block index beyond 40 bits");
        Block(u64::from(vdev) << INDEX_BITS | index)
    }

    /// From its 48-bit form; `None` when the upper 16 bits are not zero.
    pub fn from_raw(raw: u64) -> Option<Block> {
        (raw >> 48 == 0).then_some(Block(raw))
    }

    /// The 48-bit form.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// Which vdev the block lies on.
    pub fn vdev(self) -> usize {
        (self.0 >> INDEX_BITS) as usize
    }

    /// Block number on its vdev.
    pub fn index(self) -> u64 {
        self.0 & ((1 << INDEX_BITS) - 1)
    }

    /// Byte offset on its vdev.
    pub fn offset(self) -> u64 {
        self.index() * BLOCK_BYTES as u64
    }

    /// The block `n` further on the same vdev.
    pub fn add(self, n: u64) -> Block {
        Block::new(self.vdev() as u8, self.index() + n)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.vdev(), self.index())
    }
}

/// Where a block is, when it was written, and what must be in it.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Pointer(u128);

impl Pointer {
    /// A hole that nobody ever wrote: inherits nothing, was born before all.
    pub const EMPTY: Pointer = Pointer(0);

    /// A pointer to `block`, written in epoch `birth`, holding bytes with CRC-32C `crc`.
    pub fn new(block: Block, birth: Epoch, crc: u32) -> Pointer {
        assert!(birth <= EPOCH_MAX, "epoch beyond 40 bits");
        Pointer(u128::from(crc) << 96 | u128::from(birth) << 48 | u128::from(block.raw()))
    }

    /// A hole made in epoch `birth`: "became zero then".
    pub fn hole(birth: Epoch) -> Pointer {
        Pointer::new(Block::HOLE, birth, 0)
    }

    /// From its stored form.
    pub fn from_raw(raw: u128) -> Pointer {
        Pointer(raw)
    }

    /// The stored form.
    pub fn raw(self) -> u128 {
        self.0
    }

    /// The block named.
    pub fn block(self) -> Block {
        Block((self.0 as u64) & ((1 << 48) - 1))
    }

    /// The epoch in which the block was written.
    pub fn birth(self) -> Epoch {
        ((self.0 >> 48) & BIRTH_MASK) as u64
    }

    /// Reserved flags; zero in format 1.
    pub fn flags(self) -> u8 {
        (self.0 >> 88) as u8
    }

    /// CRC-32C of the block's 4096 bytes.
    pub fn crc(self) -> u32 {
        (self.0 >> 96) as u32
    }

    /// Whether this names no block.
    pub fn is_hole(self) -> bool {
        self.block() == Block::HOLE
    }

    /// The same pointer with another checksum.
    pub fn with_crc(self, crc: u32) -> Pointer {
        Pointer(self.0 & !(u128::from(u32::MAX) << 96) | u128::from(crc) << 96)
    }

    /// Whether both lead to the same content: the same block, or both are holes.
    pub fn same_block(self, other: Pointer) -> bool {
        self.block() == other.block()
    }
}

impl fmt::Debug for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_hole() {
            write!(f, "hole@{}", self.birth())
        } else {
            write!(f, "{:?}@{}#{:08x}", self.block(), self.birth(), self.crc())
        }
    }
}

/// 256 pointers in one block.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Page {
    slots: [U128; FANOUT],
}

const _: () = assert!(size_of::<Page>() == BLOCK_BYTES);

impl Page {
    /// A page of holes.
    pub fn empty() -> Box<Page> {
        Box::new(Page { slots: [U128::ZERO; FANOUT] })
    }

    /// A page of what a hole in its place stands for: holes that became so when it did.
    pub fn of_holes(hole: Pointer) -> Box<Page> {
        debug_assert!(hole.is_hole());
        Box::new(Page { slots: [U128::new(hole.0); FANOUT] })
    }

    /// A copy of 4096 stored bytes; `None` when the length is wrong or a pointer carries flags this format
    /// does not know.
    pub fn parse(bytes: &[u8]) -> Option<Box<Page>> {
        let mut page = Page::empty();
        if bytes.len() != BLOCK_BYTES {
            return None;
        }
        page.as_mut_bytes().copy_from_slice(bytes);
        page.slots.iter().all(|raw| Pointer(raw.get()).flags() == 0).then_some(page)
    }

    /// The pointer in `slot`.
    pub fn get(&self, slot: usize) -> Pointer {
        Pointer(self.slots[slot].get())
    }

    /// Puts `pointer` into `slot`.
    pub fn set(&mut self, slot: usize, pointer: Pointer) {
        self.slots[slot] = U128::new(pointer.0);
    }

    /// All slots in order.
    pub fn iter(&self) -> impl Iterator<Item = Pointer> + '_ {
        self.slots.iter().map(|raw| Pointer(raw.get()))
    }

    /// CRC-32C of the page as it would be stored.
    pub fn crc(&self) -> u32 {
        crate::crc32c::crc32c(self.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointer_has_its_golden_bytes() {
        let p = Pointer::new(Block::new(0xAB, 0x12_3456_789A), 0xCD_EF01_2345, 0xDEAD_BEEF);
        let mut page = Page::empty();
        page.set(3, p);
        assert_eq!(
            page.as_bytes()[48..64],
            [0x9A, 0x78, 0x56, 0x34, 0x12, 0xAB, 0x45, 0x23, 0x01, 0xEF, 0xCD, 0x00, 0xEF, 0xBE, 0xAD, 0xDE]
        );
        let back = Page::parse(page.as_bytes()).unwrap().get(3);
        assert_eq!((back.block().vdev(), back.block().index()), (0xAB, 0x12_3456_789A));
        assert_eq!((back.birth(), back.crc(), back.flags()), (0xCD_EF01_2345, 0xDEAD_BEEF, 0));
    }

    #[test]
    fn unknown_flags_are_refused() {
        let mut page = Page::empty();
        page.set(255, Pointer(1 << 88));
        assert!(Page::parse(page.as_bytes()).is_none());
        assert!(Page::parse(&page.as_bytes()[..4095]).is_none());
    }

    #[test]
    fn holes_keep_their_birth() {
        let hole = Pointer::hole(77);
        assert!(hole.is_hole());
        assert_eq!(hole.birth(), 77);
        assert_ne!(hole, Pointer::EMPTY);
        assert!(hole.same_block(Pointer::EMPTY));
    }
}
