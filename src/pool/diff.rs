//! What differs between two nodes, or what one node holds, in parts.
//!
//! Every shard walks its trees from where it is told and says how far it came. Below the least of these places the
//! difference is complete: that much is answered, in the order of the volume, and the next part begins there. What a part
//! costs in time and memory follows from how much is asked for and how much differs, not from how much exists.
//!
//! A node that is walked is held: deleting it is recorded at once, and taking it apart waits until the part is
//! answered. Nothing here survives a crash, and nothing needs to: a part is asked for by its offset.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::error::PoolError;
use super::home::Home;
use super::node::NodeId;
use super::pointer::{BLOCK_BYTES, CHUNK_BYTES, FANOUT};
use super::sabotage::{Sabotage, is};
use super::shard::Shard;
use super::volume::slots_before;
use super::walk::Comparison;
use crate::device::IoError;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Steps of one shard's walk before it says how far it came, whatever it found.
const STEPS_PER_PART: u32 = 4096;
/// Pieces that a shard gathers at least, so that small parts do not cost a walk from the roots for every MiB.
const PIECES_MIN: usize = 256;

/// What a changed range holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RangeKind {
    /// Blocks that were written.
    Data,
    /// Nothing any more: it reads as zeroes, and in the base it may have been something else.
    Zero,
}

/// A range of bytes; both numbers are multiples of 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiffRange {
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What it holds.
    pub kind: RangeKind,
}

/// A part of a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiffPart {
    /// Ranges in ascending order that do not touch one another unless their kinds differ. One that goes on in the
    /// next part is given as two. There may be none although there is a next part.
    pub ranges: Vec<DiffRange>,
    /// Where the next part begins; `None` when this was the last.
    pub next_offset: Option<u64>,
}

/// Slots of one leaf that differ.
struct Piece {
    slot: u64,
    count: u64,
    kind: RangeKind,
}

/// Nodes whose trees must not be taken apart now, with how many walk them.
#[derive(Default)]
pub(super) struct Holds(RefCell<BTreeMap<NodeId, u32>>);

/// The nodes stay whole for as long as this lives.
struct Held<'a> {
    holds: &'a Holds,
    nodes: Vec<NodeId>,
}

impl Holds {
    /// Whether somebody walks this node.
    pub fn has(&self, node: NodeId) -> bool {
        self.0.borrow().contains_key(&node)
    }

    fn hold(&self, nodes: Vec<NodeId>) -> Held<'_> {
        let mut holds = self.0.borrow_mut();
        nodes.iter().for_each(|node| *holds.entry(*node).or_default() += 1);
        Held { holds: self, nodes }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut holds = self.holds.0.borrow_mut();
        for node in &self.nodes {
            match holds.get_mut(node) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(holds.remove(node)),
            }
        }
    }
}

impl Shard {
    /// Slots of `node` from `from` to `end` that differ from `base`, or that hold a block where there is no base: until
    /// there are `pieces_max` pieces or the walk has taken long enough. Also gives the first slot not looked at.
    async fn diff_part(
        &self,
        node: NodeId,
        base: Option<NodeId>,
        from: u64,
        end: u64,
        pieces_max: usize,
    ) -> Result<(Vec<Piece>, u64), IoError> {
        let others: &[NodeId] = base.as_slice();
        let what = Comparison { a: node, others, floor: 0, both: true };
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut at, mut steps) = (from, 0);
        while at < end && steps < STEPS_PER_PART && pieces.len() < pieces_max {
            let leaf = at / FANOUT as u64;
            let step = self.step(what, leaf, &mut steps).await?;
            let first = (at % FANOUT as u64) as usize;
            let mut last: Option<Piece> = None;
            for (slot, place) in step.leaf.into_iter().flatten().enumerate().skip(first) {
                let slot = leaf * FANOUT as u64 + slot as u64;
                // Two holes are the same, whenever they were made.
                let forgotten = is(Sabotage::ForgetZeroes) && place.a.is_hole();
                if place.shared || place.a.same_block(place.b) || slot >= end || forgotten {
                    continue;
                }
                let kind = if place.a.is_hole() { RangeKind::Zero } else { RangeKind::Data };
                match &mut last {
                    Some(piece) if piece.slot + piece.count == slot && piece.kind == kind => piece.count += 1,
                    _ => pieces.extend(last.replace(Piece { slot, count: 1, kind })),
                }
            }
            pieces.extend(last);
            at = step.next.saturating_mul(FANOUT as u64);
        }
        Ok((pieces, at))
    }
}

impl Home {
    /// Ranges of `node` that differ from `base`, or all that hold data where there is no base, from byte `offset` on: up
    /// to `ranges_max`. Nothing is said of what lies beyond the end of `node`. While a volume is written, it is unsaid
    /// which of the changes made meanwhile are met.
    pub async fn diff_part(
        &self,
        base: Option<&str>,
        node: &str,
        offset: u64,
        ranges_max: usize,
    ) -> Result<DiffPart, PoolError> {
        if !offset.is_multiple_of(BLOCK) {
            return Err(PoolError::invalid(format!("offset {offset} is not a multiple of {BLOCK}")));
        }
        let node = self.node_of(self.find(node)?);
        let base = base.map(|base| self.find(base)).transpose()?.map(|base| self.node_of(base));
        let size = self.records.borrow().node(node).map_or(0, |node| node.size);
        if offset >= size {
            return Ok(DiffPart { ranges: Vec::new(), next_offset: None });
        }
        let held = self.holds.hold(std::iter::once(node).chain(base).collect());
        let shards = self.owners.reactors.len() as u64;
        let pieces_max = ranges_max.max(PIECES_MIN);
        let found = self.owners.each(move |shard| async move {
            let before = |offset| slots_before(offset, u64::from(shard.index), shards);
            shard.diff_part(node, base, before(offset), before(size), pieces_max).await
        });
        let found = found.await;
        drop(held);
        let deleted = |node| self.records.borrow().node(node).is_some_and(|node| node.deleting);
        if std::iter::once(node).chain(base).any(deleted) {
            // Its end waits for this walk.
            self.wake_reaper();
        }
        merge(found?, size, ranges_max)
    }
}

/// What the shards found, in the order of the volume, as far as all of them came.
fn merge(
    found: Vec<Result<(Vec<Piece>, u64), IoError>>,
    size: u64,
    ranges_max: usize,
) -> Result<DiffPart, PoolError> {
    let shards = found.len() as u64;
    let offset_of = |slot: u64, shard: u64| {
        let (leaf, within) = (slot / FANOUT as u64, slot % FANOUT as u64);
        leaf.saturating_mul(shards).saturating_add(shard).saturating_mul(CHUNK_BYTES) + within * BLOCK
    };
    let (mut reached, mut pieces) = (size, Vec::new());
    for (shard, part) in (0..).zip(found) {
        let (part, next) = part?;
        reached = reached.min(offset_of(next, shard));
        pieces.extend(part.into_iter().map(|piece| DiffRange {
            offset: offset_of(piece.slot, shard),
            length: piece.count * BLOCK,
            kind: piece.kind,
        }));
    }
    pieces.retain(|piece| piece.offset < reached);
    pieces.sort_unstable();
    let mut ranges: Vec<DiffRange> = Vec::new();
    for piece in pieces {
        match ranges.last_mut() {
            Some(last) if last.offset + last.length == piece.offset && last.kind == piece.kind => {
                last.length += piece.length;
            }
            _ => {
                if ranges.len() == ranges_max {
                    return Ok(DiffPart { ranges, next_offset: Some(piece.offset) });
                }
                ranges.push(piece);
            }
        }
    }
    Ok(DiffPart { ranges, next_offset: (reached < size).then_some(reached) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_ends_where_the_slowest_shard_is_or_where_enough_was_found() {
        let piece = |slot, count, kind| Piece { slot, count, kind };
        let found = || {
            vec![
                Ok((vec![piece(255, 1, RangeKind::Data), piece(256, 2, RangeKind::Data)], 512)),
                Ok((vec![piece(0, 3, RangeKind::Data), piece(3, 1, RangeKind::Zero)], 256)),
            ]
        };
        let mib = CHUNK_BYTES;
        let range = |offset, blocks: u64, kind| DiffRange { offset, length: blocks * BLOCK, kind };
        let all = [
            range(mib - BLOCK, 4, RangeKind::Data),
            range(mib + 3 * BLOCK, 1, RangeKind::Zero),
            range(2 * mib, 2, RangeKind::Data),
        ];
        // The second shard came to the end of chunk 1, whose next is chunk 3; the first to that of chunk 2.
        let part = merge(found(), 10 * mib, 10).unwrap();
        assert_eq!((&part.ranges[..], part.next_offset), (&all[..], Some(3 * mib)));
        let part = merge(found(), 3 * mib, 10).unwrap();
        assert_eq!((&part.ranges[..], part.next_offset), (&all[..], None));
        for count in 1..3 {
            let part = merge(found(), 3 * mib, count).unwrap();
            assert_eq!((&part.ranges[..], part.next_offset), (&all[..count], Some(all[count].offset)));
        }
        let error = merge(vec![Err(IoError::Gone)], mib, 1);
        assert!(error.is_err());
    }

    #[test]
    fn a_node_is_free_when_the_last_of_its_walks_has_ended() {
        let holds = Holds::default();
        let first = holds.hold(vec![NodeId(1), NodeId(2)]);
        let second = holds.hold(vec![NodeId(2), NodeId(2)]);
        drop(first);
        assert!(!holds.has(NodeId(1)) && holds.has(NodeId(2)));
        drop(second);
        assert!(!holds.has(NodeId(2)));
    }
}
