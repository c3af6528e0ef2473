//! Regions: their bitmaps, the stored form of one, and the table in which a shard finds its own.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use slab::Slab;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::pool::label::Geometry;
use crate::pool::pointer::{BLOCK_BYTES, Block};

/// A region: the vdev in the top 8 of 32 bits, its index on that vdev below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u32);

impl RegionId {
    /// Region `index` of `vdev`.
    pub fn new(vdev: u8, index: u32) -> RegionId {
        assert!(index < 1 << 24, "a device has fewer than 2^24 regions");
        RegionId(u32::from(vdev) << 24 | index)
    }

    /// The vdev.
    pub fn vdev(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// The index on its vdev.
    pub fn index(self) -> u32 {
        self.0 & 0xFF_FFFF
    }
}

/// What a region is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// Volume data.
    Data,
    /// First copies of metadata; the second copies are in `twin`.
    Metadata {
        /// The region of the second copies.
        twin: RegionId,
    },
}

const MAGIC: [u8; 4] = *b"RMSP";
const WORDS_MAX: usize = 16384 / 64;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRegion {
    magic: [u8; 4],
    region: U32,
    used: U32,
    blocks: U32,
    shard: U16,
    reserved: [u8; 46],
    bits: [u8; WORDS_MAX * 8],
    tail: [u8; BLOCK_BYTES - 64 - WORDS_MAX * 8],
}

const _: () = assert!(size_of::<RawRegion>() == BLOCK_BYTES);

/// The blocks of a region.
pub(super) struct Region {
    pub kind: RegionKind,
    pub first: Block,
    pub used: Vec<u64>,
    pub held: Vec<u64>,
    /// Blocks neither used nor held.
    pub free: u32,
    pub used_count: u32,
    /// The stored form is not that of `used`.
    pub dirty: bool,
}

/// The words of a bitmap that hold `count` bits from `offset` on, each with the mask of those bits.
pub(super) fn words(offset: u32, count: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = offset + count;
    (offset / 64..end.div_ceil(64)).map(move |word| {
        let (from, to) = (offset.max(word * 64) - word * 64, end.min(word * 64 + 64) - word * 64);
        (word as usize, (u64::MAX >> (64 - (to - from))) << from)
    })
}

impl Region {
    /// One with no block in use.
    pub fn empty(geometry: &Geometry, id: RegionId, kind: RegionKind) -> Region {
        let words = geometry.region_blocks as usize / 64;
        Region {
            kind,
            first: Block::new(id.vdev(), geometry.region(id.index())),
            used: vec![0; words],
            held: vec![0; words],
            free: geometry.region_blocks,
            used_count: 0,
            dirty: false,
        }
    }

    /// The stored form, one block.
    pub fn encode(&self, geometry: &Geometry, shard: u16, id: RegionId) -> Vec<u8> {
        let mut bits = [0; WORDS_MAX * 8];
        for (bytes, word) in bits.chunks_exact_mut(8).zip(&self.used) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let raw = RawRegion {
            magic: MAGIC,
            region: id.0.into(),
            used: self.used_count.into(),
            blocks: geometry.region_blocks.into(),
            shard: shard.into(),
            reserved: [0; 46],
            bits,
            tail: [0; BLOCK_BYTES - 64 - WORDS_MAX * 8],
        };
        raw.as_bytes().to_vec()
    }

    /// The first run of free blocks in `from..to`, at most `want` long, as (offset, length).
    pub fn find(&self, from: u32, to: u32, want: u32) -> Option<(u32, u32)> {
        let taken = |offset: u32| self.used[offset as usize / 64] | self.held[offset as usize / 64];
        let mut at = from;
        while at < to {
            let ahead = !taken(at) >> (at % 64);
            if ahead == 0 {
                at = (at / 64 + 1) * 64;
                continue;
            }
            at += ahead.trailing_zeros();
            if at >= to {
                return None;
            }
            let mut count = 0;
            while at + count < to && count < want {
                let offset = at + count;
                let ahead = taken(offset) >> (offset % 64);
                let run = ahead.trailing_zeros().min(64 - offset % 64);
                if run == 0 {
                    break;
                }
                count += run;
            }
            return Some((at, count.min(want).min(to - at)));
        }
        None
    }
}

/// The bitmap in the stored form of a region, if that is whole and is `shard`'s.
pub(super) fn decode(
    geometry: &Geometry,
    shard: u16,
    id: RegionId,
    stored: &[u8],
) -> Result<Vec<u64>, &'static str> {
    let raw = RawRegion::ref_from_bytes(stored).map_err(|_| "a region record is one block")?;
    if raw.magic != MAGIC || raw.region.get() != id.0 || raw.shard.get() != shard {
        return Err("a region record names another region or shard");
    }
    if raw.blocks.get() != geometry.region_blocks {
        return Err("a region record has another region size");
    }
    let words = geometry.region_blocks as usize / 64;
    let (bits, beyond) = raw.bits.split_at(words * 8);
    let used: Vec<u64> = bits
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        .collect();
    let count: u32 = used.iter().map(|word| word.count_ones()).sum();
    if count != raw.used.get() || beyond.iter().any(|byte| *byte != 0) {
        return Err("a region record's count does not fit its bitmap");
    }
    Ok(used)
}

/// A shard's regions: each is found in one step, for every block written asks for its region.
#[derive(Default)]
pub(super) struct Regions {
    slots: Slab<Region>,
    order: BTreeMap<RegionId, u32>,
    /// By vdev, then by index: one more than the slot, zero for a region that is not there.
    places: Vec<Vec<u32>>,
}

impl Regions {
    pub fn insert(&mut self, id: RegionId, region: Region) {
        self.remove(id);
        let slot = self.slots.insert(region) as u32;
        let (vdev, index) = (usize::from(id.vdev()), id.index() as usize);
        if self.places.len() <= vdev {
            self.places.resize_with(vdev + 1, Vec::new);
        }
        let places = &mut self.places[vdev];
        if places.len() <= index {
            places.resize(index + 1, 0);
        }
        places[index] = slot + 1;
        self.order.insert(id, slot);
    }

    pub fn remove(&mut self, id: RegionId) {
        if let Some(slot) = self.order.remove(&id) {
            self.slots.remove(slot as usize);
            self.places[usize::from(id.vdev())][id.index() as usize] = 0;
        }
    }

    fn slot(&self, id: RegionId) -> Option<usize> {
        let place = self.places.get(usize::from(id.vdev()))?.get(id.index() as usize)?;
        place.checked_sub(1).map(|slot| slot as usize)
    }

    pub fn get(&self, id: RegionId) -> Option<&Region> {
        self.slots.get(self.slot(id)?)
    }

    pub fn get_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        let slot = self.slot(id)?;
        self.slots.get_mut(slot)
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// In the order of their ids.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (RegionId, &Region)> {
        self.order.iter().map(|(id, slot)| (*id, &self.slots[*slot as usize]))
    }
}
