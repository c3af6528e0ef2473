//! A shard as it is at one moment, taken apart for a check: its nodes, the roots of its trees, and its bitmaps.
//!
//! A picture is taken of a commit, from the devices alone, or of a state in memory that is ahead of the devices; then the
//! pages that are ahead come along.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use super::cache::Object;
use super::label::Geometry;
use super::node::Nodes;
use super::pointer::{Block, Epoch, Page, Pointer};
use super::space::{RegionId, RegionKind};
use super::tree::State;

/// The bitmap of a region.
pub struct Bitmap {
    /// What the region is for.
    pub kind: RegionKind,
    /// A bit for each block in use, lowest bit first.
    pub used: Vec<u64>,
    /// False when the stored bitmap is lost.
    pub known: bool,
}

/// A shard at one moment.
pub struct Picture {
    /// Nodes.
    pub nodes: Nodes,
    /// The tree of node records.
    pub nodes_root: Pointer,
    /// The tree of bitmaps.
    pub space_root: Pointer,
    /// The regions that the shard owns.
    pub regions: BTreeMap<RegionId, Bitmap>,
    /// Pages that are ahead of the devices.
    pub unstored: HashMap<Block, Box<Page>>,
    /// Nothing was born later.
    pub epoch: Epoch,
}

impl Picture {
    /// Of a shard without content, with the regions that the catalog gives it.
    pub fn blank(geometry: &Geometry, regions: &[(RegionId, RegionKind)]) -> Picture {
        let words = geometry.region_blocks as usize / 64;
        let bitmap = |kind| Bitmap { kind, used: vec![0; words], known: true };
        Picture {
            nodes: Nodes::default(),
            nodes_root: Pointer::EMPTY,
            space_root: Pointer::EMPTY,
            regions: regions.iter().map(|(id, kind)| (*id, bitmap(*kind))).collect(),
            unstored: HashMap::new(),
            epoch: 0,
        }
    }

    /// Of the state in memory, at rest: no commit is under way.
    pub fn of(state: &mut State) -> Picture {
        let unstored = state.pages.unstored().map(|(block, page)| (block, Box::new(page.clone())));
        let unstored = unstored.collect();
        let bitmap = |(id, kind, used): (RegionId, RegionKind, &[u64])| {
            (id, Bitmap { kind, used: used.to_vec(), known: true })
        };
        Picture {
            nodes: state.nodes.clone(),
            nodes_root: state.root(Object::Nodes),
            space_root: state.root(Object::Space),
            regions: state.space.used_bits().map(bitmap).collect(),
            unstored,
            epoch: state.epoch,
        }
    }
}

/// What marking a block found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marked {
    /// Nothing named it before.
    New,
    /// Something named it before.
    Again,
    /// It lies in no region of this shard.
    Outside,
}

/// The blocks that were found to be named, one bit each.
#[derive(Clone)]
pub struct Marks {
    geometry: Geometry,
    regions: BTreeMap<RegionId, Vec<u64>>,
}

impl Marks {
    /// No block of these regions.
    pub fn new<'a>(geometry: Geometry, regions: impl Iterator<Item = &'a RegionId>) -> Marks {
        let words = geometry.region_blocks as usize / 64;
        Marks { geometry, regions: regions.map(|id| (*id, vec![0; words])).collect() }
    }

    /// Marks a block.
    pub fn mark(&mut self, block: Block) -> Marked {
        let Some((index, offset)) = self.geometry.region_of(block) else { return Marked::Outside };
        let Ok(vdev) = u8::try_from(block.vdev()) else { return Marked::Outside };
        let Some(words) = self.regions.get_mut(&RegionId::new(vdev, index)) else { return Marked::Outside };
        let (word, bit) = (&mut words[offset as usize / 64], 1u64 << (offset % 64));
        if *word & bit != 0 {
            return Marked::Again;
        }
        *word |= bit;
        Marked::New
    }

    /// Whether a block is marked.
    pub fn contains(&self, block: Block) -> bool {
        let Some((index, offset)) = self.geometry.region_of(block) else { return false };
        let region =
            u8::try_from(block.vdev()).ok().and_then(|vdev| self.regions.get(&RegionId::new(vdev, index)));
        region.is_some_and(|words| words[offset as usize / 64] & (1 << (offset % 64)) != 0)
    }

    /// The bits of a region.
    pub fn of(&self, region: RegionId) -> &[u64] {
        self.regions.get(&region).map_or(&[], Vec::as_slice)
    }

    /// Runs of blocks whose bit is set in `a` and not in `b`, as (first block, count), within one region each.
    pub fn runs(geometry: &Geometry, region: RegionId, a: &[u64], b: &[u64]) -> Vec<(Block, u64)> {
        let first = Block::new(region.vdev(), geometry.region(region.index()));
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            let mut rest = a & !b;
            while rest != 0 {
                let offset = at as u64 * 64 + u64::from(rest.trailing_zeros());
                rest &= rest - 1;
                match runs.last_mut() {
                    Some((from, count)) if *from + *count == offset => *count += 1,
                    _ => runs.push((offset, 1)),
                }
            }
        }
        runs.into_iter().map(|(offset, count)| (first.add(offset), count)).collect()
    }
}
