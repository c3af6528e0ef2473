//! The root of a shard: the one block that a commit replaces to become true. Two slots, used in turn, each in two
//! copies; the newest whole one counts.
#![forbid(unsafe_code)]

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::node::{NodeId, Reaping};
use super::pointer::{BLOCK_BYTES, EPOCH_MAX, Epoch, Pointer};

const MAGIC: [u8; 4] = *b"RMRT";
/// The node being worked on stays, as a ghost; 0 = it is taken apart.
const THINNING: u16 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct RawRoot {
    nodes: U128,
    space: U128,
    pool: [u8; 16],
    magic: [u8; 4],
    crc: U32,
    generation: U64,
    epoch: U64,
    journal: U64,
    reaping_leaf: U64,
    reaping_node: U32,
    shard: U16,
    reaping_kind: U16,
    tail: [u8; BLOCK_BYTES - 96],
}

const _: () = assert!(size_of::<RawRoot>() == BLOCK_BYTES);

/// What a root slot says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootRecord {
    /// The commit; slot `generation mod 2` holds it.
    pub generation: u64,
    /// Epoch of new blocks when it was made.
    pub epoch: Epoch,
    /// First journal sequence that is not part of it.
    pub journal: u64,
    /// The tree of node records.
    pub nodes: Pointer,
    /// The tree of region bitmaps.
    pub space: Pointer,
    /// The deleted node that is being worked on, and how far.
    pub reaping: Option<Reaping>,
}

impl RootRecord {
    /// The stored form, one block.
    pub fn encode(&self, pool: Uuid, shard: u16) -> Vec<u8> {
        let mut raw = RawRoot::new_zeroed();
        raw.magic = MAGIC;
        raw.pool = *pool.as_bytes();
        raw.shard = shard.into();
        raw.generation = self.generation.into();
        raw.epoch = self.epoch.into();
        raw.journal = self.journal.into();
        raw.nodes = self.nodes.raw().into();
        raw.space = self.space.raw().into();
        if let Some(reaping) = self.reaping {
            raw.reaping_node = reaping.node.0.into();
            raw.reaping_leaf = reaping.cursor.into();
            raw.reaping_kind = u16::from(reaping.thinning).into();
        }
        raw.crc = crate::crc32c::crc32c(raw.as_bytes()).into();
        raw.as_bytes().to_vec()
    }

    /// Reads a stored root; `None` when it is not a whole root of this shard.
    pub fn decode(pool: Uuid, shard: u16, bytes: &[u8]) -> Option<RootRecord> {
        /// Beyond anything a pool can count up to.
        const NUMBER_MAX: u64 = 1 << 62;
        let mut raw = RawRoot::read_from_bytes(bytes).ok()?;
        let crc = std::mem::take(&mut raw.crc).get();
        if raw.magic != MAGIC || crate::crc32c::crc32c(raw.as_bytes()) != crc {
            return None;
        }
        let (nodes, space) = (Pointer::from_raw(raw.nodes.get()), Pointer::from_raw(raw.space.get()));
        if raw.pool != *pool.as_bytes()
            || raw.shard.get() != shard
            || nodes.flags() != 0
            || space.flags() != 0
            || raw.epoch.get() > EPOCH_MAX / 2
            || raw.generation.get() > NUMBER_MAX
            || raw.journal.get() > NUMBER_MAX
            || raw.reaping_kind.get() > THINNING
        {
            return None;
        }
        Some(RootRecord {
            generation: raw.generation.get(),
            epoch: raw.epoch.get(),
            journal: raw.journal.get(),
            nodes,
            space,
            reaping: (raw.reaping_node.get() != 0).then(|| Reaping {
                node: NodeId(raw.reaping_node.get()),
                cursor: raw.reaping_leaf.get(),
                thinning: raw.reaping_kind.get() == THINNING,
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::pointer::Block;

    #[test]
    fn round_trip_and_no_flipped_bit_passes() {
        let pool = Uuid::from_u128(9);
        let root = RootRecord {
            generation: 12,
            epoch: 7,
            journal: 99,
            nodes: Pointer::new(Block::new(1, 5), 6, 7),
            space: Pointer::new(Block::new(0, 8), 7, 9),
            reaping: Some(Reaping { node: NodeId(4), cursor: 1000, thinning: true }),
        };
        let bytes = root.encode(pool, 2);
        assert_eq!(RootRecord::decode(pool, 2, &bytes), Some(root));
        assert_eq!(RootRecord::decode(pool, 3, &bytes), None);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RootRecord::decode(pool, 2, &bad), None);
        }
    }
}
