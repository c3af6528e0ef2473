//! The label: what a device says about itself, and the geometry that follows from it.
//!
//! Every device of a pool carries its label twice, in its first and in its last block. A label names the pool,
//! the device, all devices of the pool in vdev order, and the few numbers from which every fixed place follows
//! ([`Geometry`]). A pool finds its devices by the UUIDs in here, never by path.
//!
//! ```text
//! block 0   root slots         journals            catalog            regions …                      last block
//! ┌───────┬──────────────────┬───────────────────┬──────────────────┬──────────┬──────────┬──────────┬───────┐
//! │ label │ copy 0 │ copy 1  │ copy 0 │ copy 1   │ copy 0 │ copy 1  │ region 0 │ region 1 │ …        │ label │
//! └───────┴──────────────────┴───────────────────┴──────────────────┴──────────┴──────────┴──────────┴───────┘
//! ```
//!
//! Each device reserves room for both copies of everything; which of them are in use follows from the number of
//! devices: copy `c` of shard `s` lives on vdev `(s + c) mod D`, copy `c` of the catalog on vdev `c mod D`.
#![forbid(unsafe_code)]

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::pointer::{BLOCK_BYTES, Block};

/// Devices that one pool can have in format 1.
pub const VDEVS_MAX: usize = 64;
/// Shards that one pool can have.
pub const SHARDS_MAX: u16 = 256;
/// The smallest device that can join a pool.
pub const DEVICE_BYTES_MIN: u64 = 64 << 20;

const MAGIC: [u8; 8] = *b"RIMROCK\x01";
const VERSION: u32 = 1;
const MIB: u64 = 1 << 20;

/// The stored form, one block.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawLabel {
    magic: [u8; 8],
    version: U32,
    crc: U32,
    pool: [u8; 16],
    device: [u8; 16],
    vdev: U16,
    vdevs: U16,
    shards: U16,
    state: U16,
    region_blocks: U32,
    journal_blocks: U32,
    catalog_blocks: U32,
    pad: U32,
    device_blocks: U64,
    created: U64,
    name: [u8; 256],
    devices: [[u8; 16]; VDEVS_MAX],
    reserved: [u8; BLOCK_BYTES - 344 - 16 * VDEVS_MAX],
}

const _: () = assert!(size_of::<RawLabel>() == BLOCK_BYTES);

/// A device's label, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// The pool this device belongs to.
    pub pool: Uuid,
    /// The pool's name when it was created.
    pub name: String,
    /// This device.
    pub device: Uuid,
    /// This device's place among `devices`.
    pub vdev: u8,
    /// All devices of the pool, in vdev order.
    pub devices: Vec<Uuid>,
    /// False after `pool destroy`.
    pub live: bool,
    /// Seconds since 1970 of the pool's creation.
    pub created: u64,
    /// Where everything is.
    pub geometry: Geometry,
}

/// The fixed places of one device, all in 4 KiB blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Shards of the pool.
    pub shards: u16,
    /// Blocks of a region, 256 – 16384 (1 – 64 MiB), a power of two.
    pub region_blocks: u32,
    /// Blocks of one shard's journal ring.
    pub journal_blocks: u32,
    /// Blocks of one half of the catalog.
    pub catalog_blocks: u32,
    /// Blocks of the device that the pool uses.
    pub device_blocks: u64,
}

/// Regions of one device: a region's number has 24 bits.
pub const REGIONS_MAX: u32 = 1 << 24;

/// What is wrong with a label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// No label at all.
    #[error("no Rimrock label")]
    Missing,
    /// The label's checksum does not fit.
    #[error("the label's checksum does not fit")]
    Checksum,
    /// The label is of a format this version does not know.
    #[error("the label has format {0}; this Rimrock knows format {VERSION}")]
    Version(u32),
    /// A field has an impossible value.
    #[error("the label's field `{0}` has an impossible value")]
    Field(&'static str),
}

impl Geometry {
    /// Chooses the fixed places for devices of `smallest` bytes and a pool of `total` bytes.
    pub fn choose(smallest: u64, total: u64, shards: u16, region_bytes: Option<u64>) -> Geometry {
        let pow2 = |bytes: u64, low: u64, high: u64| bytes.max(1).next_power_of_two().clamp(low, high);
        let region = region_bytes.unwrap_or_else(|| pow2(total / 1024, MIB, 64 * MIB));
        let journal = pow2(total / 16384, MIB / 8, 8 * MIB);
        // At least four times what the table of regions takes.
        let catalog = pow2((total / 4096).min(32 * MIB).max(total / region * 32), MIB / 2, 256 * MIB);
        Geometry {
            shards,
            region_blocks: (region / BLOCK_BYTES as u64) as u32,
            journal_blocks: (journal / BLOCK_BYTES as u64) as u32,
            catalog_blocks: (catalog / BLOCK_BYTES as u64) as u32,
            device_blocks: smallest / BLOCK_BYTES as u64,
        }
    }

    /// Bytes of a region.
    pub fn region_bytes(&self) -> u64 {
        u64::from(self.region_blocks) * BLOCK_BYTES as u64
    }

    /// The block of root slot `slot` (0 or 1) of `shard` in copy `copy`, on the vdev of that copy.
    pub fn root_slot(&self, copy: u64, shard: u16, slot: u64) -> u64 {
        1 + (copy * u64::from(self.shards) + u64::from(shard)) * 2 + slot
    }

    fn journals(&self) -> u64 {
        1 + 4 * u64::from(self.shards)
    }

    /// The first block of the journal ring of `shard` in copy `copy`.
    pub fn journal(&self, copy: u64, shard: u16) -> u64 {
        self.journals() + (copy * u64::from(self.shards) + u64::from(shard)) * u64::from(self.journal_blocks)
    }

    fn catalogs(&self) -> u64 {
        self.journals() + 2 * u64::from(self.shards) * u64::from(self.journal_blocks)
    }

    /// The first block of half `half` (0 or 1) of copy `copy` of the catalog.
    pub fn catalog(&self, copy: u64, half: u64) -> u64 {
        self.catalogs() + (copy * 2 + half) * u64::from(self.catalog_blocks)
    }

    fn regions_start(&self) -> u64 {
        let end = self.catalogs() + 4 * u64::from(self.catalog_blocks);
        end.next_multiple_of(u64::from(self.region_blocks))
    }

    /// Regions that fit on the device between the catalog and the second label.
    pub fn regions(&self) -> u32 {
        let room = self.device_blocks.saturating_sub(1).saturating_sub(self.regions_start());
        (room / u64::from(self.region_blocks)) as u32
    }

    /// The first block of region `index` on its device.
    pub fn region(&self, index: u32) -> u64 {
        self.regions_start() + u64::from(index) * u64::from(self.region_blocks)
    }

    /// The region that holds block `block`, as (index on its device, offset in the region); `None` outside.
    pub fn region_of(&self, block: Block) -> Option<(u32, u32)> {
        let from = block.index().checked_sub(self.regions_start())?;
        let index = from / u64::from(self.region_blocks);
        (index < u64::from(self.regions()))
            .then_some((index as u32, (from % u64::from(self.region_blocks)) as u32))
    }

    /// The block of the second label.
    pub fn last_block(&self) -> u64 {
        self.device_blocks - 1
    }
}

impl Label {
    /// The stored form, one block.
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = RawLabel::new_zeroed();
        raw.magic = MAGIC;
        raw.version = VERSION.into();
        raw.pool = *self.pool.as_bytes();
        raw.device = *self.device.as_bytes();
        raw.vdev = u16::from(self.vdev).into();
        raw.vdevs = (self.devices.len() as u16).into();
        raw.shards = self.geometry.shards.into();
        raw.state = u16::from(self.live).into();
        raw.region_blocks = self.geometry.region_blocks.into();
        raw.journal_blocks = self.geometry.journal_blocks.into();
        raw.catalog_blocks = self.geometry.catalog_blocks.into();
        raw.device_blocks = self.geometry.device_blocks.into();
        raw.created = self.created.into();
        let name = &self.name.as_bytes()[..self.name.len().min(255)];
        raw.name[..name.len()].copy_from_slice(name);
        for (slot, uuid) in raw.devices.iter_mut().zip(&self.devices) {
            *slot = *uuid.as_bytes();
        }
        raw.crc = crate::crc32c::crc32c(raw.as_bytes()).into();
        raw.as_bytes().to_vec()
    }

    /// Reads and checks one stored label.
    pub fn decode(block: &[u8]) -> Result<Label, LabelError> {
        let raw = RawLabel::ref_from_bytes(block).map_err(|_| LabelError::Missing)?;
        if raw.magic[..7] != MAGIC[..7] {
            return Err(LabelError::Missing);
        }
        let mut copy = RawLabel::read_from_bytes(block).map_err(|_| LabelError::Missing)?;
        copy.crc = 0.into();
        if crate::crc32c::crc32c(copy.as_bytes()) != raw.crc.get() {
            return Err(LabelError::Checksum);
        }
        if raw.version.get() != VERSION || raw.magic != MAGIC {
            return Err(LabelError::Version(raw.version.get()));
        }
        let vdevs = usize::from(raw.vdevs.get());
        let check = |ok: bool, field| if ok { Ok(()) } else { Err(LabelError::Field(field)) };
        check((1..=VDEVS_MAX).contains(&vdevs), "vdevs")?;
        check(usize::from(raw.vdev.get()) < vdevs, "vdev")?;
        check((1..=SHARDS_MAX).contains(&raw.shards.get()), "shards")?;
        check(raw.state.get() <= 1, "state")?;
        let region = raw.region_blocks.get();
        check(region.is_power_of_two() && (256..=16384).contains(&region), "region_blocks")?;
        check((32..=65536).contains(&raw.journal_blocks.get()), "journal_blocks")?;
        check((16..=65536).contains(&raw.catalog_blocks.get()), "catalog_blocks")?;
        let geometry = Geometry {
            shards: raw.shards.get(),
            region_blocks: region,
            journal_blocks: raw.journal_blocks.get(),
            catalog_blocks: raw.catalog_blocks.get(),
            device_blocks: raw.device_blocks.get(),
        };
        check(geometry.device_blocks < 1 << 40, "device_blocks")?;
        check((1..=REGIONS_MAX).contains(&geometry.regions()), "device_blocks")?;
        let end = raw.name.iter().position(|&b| b == 0).unwrap_or(raw.name.len());
        let name = std::str::from_utf8(&raw.name[..end]).map_err(|_| LabelError::Field("name"))?.to_owned();
        Ok(Label {
            pool: Uuid::from_bytes(raw.pool),
            name,
            device: Uuid::from_bytes(raw.device),
            vdev: raw.vdev.get() as u8,
            devices: raw.devices[..vdevs].iter().map(|b| Uuid::from_bytes(*b)).collect(),
            live: raw.state.get() == 1,
            created: raw.created.get(),
            geometry,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> Label {
        Label {
            pool: Uuid::from_u128(1),
            name: "models".into(),
            device: Uuid::from_u128(3),
            vdev: 1,
            devices: vec![Uuid::from_u128(2), Uuid::from_u128(3)],
            live: true,
            created: 1_700_000_000,
            geometry: Geometry::choose(16 << 30, 32 << 30, 8, None),
        }
    }

    #[test]
    fn round_trip_and_every_flipped_bit_is_found() {
        let bytes = label().encode();
        assert_eq!(Label::decode(&bytes).unwrap(), label());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Label::decode(&bad).is_err(), "bit {bit} flipped unseen");
        }
        assert_eq!(Label::decode(&[0; 4096]), Err(LabelError::Missing));
    }

    #[test]
    fn places_do_not_overlap() {
        for (size, shards) in [(DEVICE_BYTES_MIN, 8), (16 << 30, 8), (1 << 40, 64), (64 << 40, 256)] {
            let g = Geometry::choose(size, size, shards, None);
            let mut next = 1;
            for copy in 0..2 {
                for shard in 0..shards {
                    for slot in 0..2 {
                        assert_eq!(g.root_slot(copy, shard, slot), next);
                        next += 1;
                    }
                }
            }
            assert_eq!(g.journal(0, 0), next);
            assert_eq!(
                g.journal(1, shards - 1) + u64::from(g.journal_blocks),
                g.catalog(0, 0),
                "journals end where the catalog starts"
            );
            assert!(g.catalog(1, 1) + u64::from(g.catalog_blocks) <= g.region(0));
            assert!(g.region(g.regions() - 1) + u64::from(g.region_blocks) <= g.last_block());
            assert_eq!(g.region_of(Block::new(0, g.region(1) + 5)), Some((1, 5)));
            assert_eq!(g.region_of(Block::new(0, g.region(0) - 1)), None);
            if shards == 8 {
                assert!(g.regions() >= 40, "{size}: {} regions", g.regions());
            }
        }
    }
}
