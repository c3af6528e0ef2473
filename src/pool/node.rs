//! Nodes as one shard sees them: where each node's tree starts, and which blocks it owns.
//!
//! A *node* is a volume's head or a snapshot. A head that is sealed becomes a snapshot, and a new head with the
//! sealed one as its parent goes on; nothing is copied. A node that never wrote in this shard has no root of its
//! own here and inherits its parent's, so a clone, a snapshot and a rollback cost a shard nothing.
//!
//! **Ownership.** A block with `birth > epoch(parent)` belongs to its node alone and is freed when overwritten; an
//! older one belongs to an ancestor. [`Nodes::floor`] is that epoch.
//!
//! **Ghosts.** A deleted node of which several others grew stays as a *ghost* for as long as they do: it keeps what they
//! share. Of its tree only what it owns counts; what it inherited it no longer keeps from being freed, so pointers at or
//! below its floor are void and must not be followed ([`Nodes::void_below`]).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use zerocopy::little_endian::{U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::pointer::{BLOCK_BYTES, Epoch, LEAVES_MAX, Pointer};

/// A node's number; never used again after the node is gone. 0 is never used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// What a shard must know of a node from the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lineage {
    /// The node it grew from.
    pub parent: Option<NodeId>,
    /// The epoch that ended with it; `None` for a head.
    pub sealed: Option<Epoch>,
    /// Deleted, and kept for what several others that grew from it share.
    pub ghost: bool,
}

/// A deleted node that is being worked on, and how far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reaping {
    /// The node.
    pub node: NodeId,
    /// The first leaf not yet passed.
    pub cursor: u64,
    /// Only what nobody else holds goes; the node stays, as a ghost. Otherwise it is taken apart: what was passed
    /// is no longer its own.
    pub thinning: bool,
}

/// Where a node's tree starts in this shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// As its parent's.
    Inherited,
    /// A page of its own.
    Own(Pointer),
    /// Deleted; all that it alone held is free.
    Reaped,
}

/// A node's record in this shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its root.
    pub root: Root,
    /// Blocks of data that its tree names.
    pub referenced: u64,
    /// Of these, blocks that it does not share with its parent.
    pub written: u64,
}

/// Records in one stored block.
pub const SLOTS_PER_BLOCK: u32 = (BLOCK_BYTES / size_of::<RawSlot>()) as u32;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct RawSlot {
    root: U128,
    referenced: U64,
    written: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawBlock {
    slots: [RawSlot; BLOCK_BYTES / size_of::<RawSlot>()],
}

const _: () = assert!(size_of::<RawBlock>() == BLOCK_BYTES);

const INHERITED: Slot = Slot { root: Root::Inherited, referenced: 0, written: 0 };

/// All nodes of one shard.
#[derive(Clone, Default)]
pub struct Nodes {
    lineage: BTreeMap<NodeId, Lineage>,
    children: HashMap<NodeId, BTreeSet<NodeId>>,
    slots: BTreeMap<NodeId, Slot>,
    dirty: BTreeSet<u32>,
    /// For a node that inherits: the ancestor that owned the root when it was last looked for.
    hints: BTreeMap<NodeId, NodeId>,
    reaping: Option<Reaping>,
    /// Nodes that were taken apart here and that the catalog still has.
    reaped: BTreeSet<NodeId>,
    /// Blocks that a ghost's children have ceased to name since it was thinned.
    stale: HashMap<NodeId, u64>,
}

impl Nodes {
    /// Tells the shard about a node, or about its changed lineage.
    pub fn set_lineage(&mut self, node: NodeId, lineage: Lineage) {
        self.leave_parent(node);
        if let Some(parent) = lineage.parent {
            self.children.entry(parent).or_default().insert(node);
        }
        self.lineage.insert(node, lineage);
        self.hints.remove(&node);
    }

    /// Forgets a node that the catalog no longer has, and its record.
    pub fn forget(&mut self, node: NodeId) {
        self.leave_parent(node);
        self.lineage.remove(&node);
        self.hints.remove(&node);
        self.reaped.remove(&node);
        self.stale.remove(&node);
        if self.slots.remove(&node).is_some() {
            self.touch(node);
        }
    }

    /// Forgets the records of nodes that were taken apart and that the catalog no longer has.
    pub fn forget_unknown(&mut self) {
        let gone = |(id, slot): (&NodeId, &Slot)| {
            (slot.root == Root::Reaped && !self.lineage.contains_key(id)).then_some(*id)
        };
        let gone: Vec<NodeId> = self.slots.iter().filter_map(gone).collect();
        for node in gone {
            self.reaped.remove(&node);
            self.slots.remove(&node);
            self.touch(node);
        }
    }

    fn leave_parent(&mut self, node: NodeId) {
        if let Some(parent) = self.parent(node)
            && let Some(siblings) = self.children.get_mut(&parent)
        {
            siblings.remove(&node);
            if siblings.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    /// Whether the catalog has this node.
    pub fn contains(&self, node: NodeId) -> bool {
        self.lineage.contains_key(&node)
    }

    /// The nodes known, in order.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.lineage.keys().copied()
    }

    /// What the catalog says of a node.
    pub fn lineage(&self, node: NodeId) -> Option<Lineage> {
        self.lineage.get(&node).copied()
    }

    /// The nodes with a tree of their own, in order.
    pub fn own_roots(&self) -> Vec<(NodeId, Pointer)> {
        let own = self.slots.iter().filter_map(|(id, slot)| match slot.root {
            Root::Own(root) => Some((*id, root)),
            _ => None,
        });
        own.collect()
    }

    /// The nearest node above with a tree of its own, whatever was taken apart in between.
    pub fn base(&self, node: NodeId) -> Option<NodeId> {
        let mut at = self.parent(node);
        while let Some(id) = at {
            if let Root::Own(_) = self.slot(id).root {
                return Some(id);
            }
            at = self.parent(id);
        }
        None
    }

    /// The nodes whose parent is `node`.
    pub fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.children.get(&node).into_iter().flatten().copied()
    }

    /// Whether a node is deleted so far that nobody reads its tree and it keeps nothing for itself.
    fn is_transparent(&self, node: NodeId) -> bool {
        self.is_ghost(node)
            || self.slot(node).root == Root::Reaped
            || self.reaping.is_some_and(|reaping| reaping.node == node && !reaping.thinning)
    }

    /// Whether the catalog has a node and its tree is still all that it was.
    pub fn is_readable(&self, node: NodeId) -> bool {
        self.contains(node)
            && !self.is_transparent(node)
            && self.reaping.is_none_or(|reaping| reaping.node != node)
    }

    /// Who gets what a node leaves: its children, or theirs where this shard has taken them apart already, though the
    /// catalog does not know of it yet.
    pub fn heirs(&self, node: NodeId) -> Vec<NodeId> {
        let mut heirs = Vec::new();
        let mut from: Vec<NodeId> = self.children(node).collect();
        while let Some(child) = from.pop() {
            match self.slot(child).root {
                Root::Reaped => from.extend(self.children(child)),
                _ => heirs.push(child),
            }
        }
        heirs
    }

    /// Whether a node is a ghost.
    pub fn is_ghost(&self, node: NodeId) -> bool {
        self.lineage.get(&node).is_some_and(|lineage| lineage.ghost)
    }

    /// The nearest nodes below `node` whose trees are whole: its children, those of ghosts in their place.
    pub fn below(&self, node: NodeId) -> Vec<NodeId> {
        self.below_all(self.children(node).collect())
    }

    fn below_all(&self, mut from: Vec<NodeId>) -> Vec<NodeId> {
        let mut below = Vec::new();
        while let Some(node) = from.pop() {
            match self.is_transparent(node) {
                true => from.extend(self.children(node)),
                false => below.push(node),
            }
        }
        below
    }

    /// What `node` would leave behind: blocks of its tree born after the epoch returned that none of the nodes returned
    /// names. Ghosts above hold nothing for themselves.
    pub fn around(&self, node: NodeId) -> (Epoch, Vec<NodeId>) {
        let mut from: Vec<NodeId> = self.children(node).collect();
        let (mut below, mut above) = (node, self.parent(node));
        while let Some(id) = above
            && self.is_transparent(id)
        {
            from.extend(self.children(id).filter(|child| *child != below));
            (below, above) = (id, self.parent(id));
        }
        (above.map_or(0, |id| self.sealed(id)), self.below_all(from))
    }

    fn sealed(&self, node: NodeId) -> Epoch {
        self.lineage.get(&node).and_then(|lineage| lineage.sealed).unwrap_or(0)
    }

    /// The last epoch of a node that takes no more writes.
    pub fn last_epoch(&self, node: NodeId) -> Option<Epoch> {
        self.lineage.get(&node).and_then(|lineage| lineage.sealed)
    }

    /// Pointers born at or before this epoch in the tree of `node`, up to leaf `end`, mean nothing.
    pub fn void_below(&self, node: NodeId, end: u64) -> Epoch {
        if self.is_ghost(node) { self.floor(node, end) } else { 0 }
    }

    fn parent(&self, node: NodeId) -> Option<NodeId> {
        self.lineage.get(&node).and_then(|lineage| lineage.parent)
    }

    /// The record of a node.
    pub fn slot(&self, node: NodeId) -> Slot {
        self.slots.get(&node).copied().unwrap_or(INHERITED)
    }

    /// The node whose root `node`'s tree starts at, if any has one.
    fn owner(&mut self, node: NodeId) -> Option<NodeId> {
        if let Root::Own(_) = self.slot(node).root {
            return Some(node);
        }
        if let Some(hint) = self.hints.get(&node).copied()
            && let Root::Own(_) = self.slot(hint).root
        {
            return Some(hint);
        }
        let mut at = self.parent(node);
        while let Some(id) = at {
            // What an ancestor found when it was a head is still so, unless that one was reaped.
            let hint = self.hints.get(&id).copied();
            for found in [Some(id), hint].into_iter().flatten() {
                if let Root::Own(_) = self.slot(found).root {
                    self.hints.insert(node, found);
                    return Some(found);
                }
            }
            at = self.parent(id);
        }
        None
    }

    /// What [`root`](Nodes::root) would give now, and nothing of it is remembered: ancestors may still get roots of their
    /// own, as in the middle of a replay.
    pub fn root_for_now(&self, node: NodeId) -> Pointer {
        let mut at = Some(node);
        while let Some(id) = at {
            if let Root::Own(pointer) = self.slot(id).root {
                return pointer;
            }
            at = self.parent(id);
        }
        Pointer::EMPTY
    }

    /// Blocks (referenced, written) of every node, in the order of their numbers. A parent comes before its children.
    pub fn counts(&self) -> Vec<(NodeId, u64, u64)> {
        let mut counts: Vec<(NodeId, u64, u64)> = Vec::with_capacity(self.lineage.len());
        for (id, lineage) in &self.lineage {
            let slot = self.slot(*id);
            let names = match slot.root {
                Root::Inherited => {
                    let above =
                        lineage.parent.map(|parent| counts.binary_search_by_key(&parent, |count| count.0));
                    above.and_then(Result::ok).map_or(0, |at| counts[at].1)
                }
                _ => slot.referenced,
            };
            counts.push((*id, names, slot.written));
        }
        counts
    }

    /// Where the tree of `node` starts; a hole when nobody of its line wrote here.
    pub fn root(&mut self, node: NodeId) -> Pointer {
        match self.owner(node).map(|owner| self.slot(owner).root) {
            Some(Root::Own(pointer)) => pointer,
            _ => Pointer::EMPTY,
        }
    }

    /// Gives `node` a root of its own. The first time it takes over its ancestor's count of referenced blocks.
    pub fn set_root(&mut self, node: NodeId, root: Pointer) {
        let referenced = self.referenced(node);
        let slot = self.slots.entry(node).or_insert(INHERITED);
        if slot.root == Root::Inherited {
            slot.referenced = referenced;
        }
        slot.root = Root::Own(root);
        self.dirty.insert(node.0 / SLOTS_PER_BLOCK);
    }

    /// Blocks of data that the tree of `node` names.
    pub fn referenced(&mut self, node: NodeId) -> u64 {
        self.owner(node).map_or(0, |owner| self.slot(owner).referenced)
    }

    /// Marks the record block of `node` as changed.
    pub fn touch(&mut self, node: NodeId) {
        self.dirty.insert(node.0 / SLOTS_PER_BLOCK);
    }

    /// Adds to the counts of a node that has a root of its own.
    pub fn count(&mut self, node: NodeId, referenced: i64, written: i64) {
        let Some(slot) = self.slots.get_mut(&node) else { return };
        let short = slot.written.checked_add_signed(written).is_none().then(|| slot.written as i64 + written);
        slot.referenced = slot.referenced.saturating_add_signed(referenced);
        slot.written = slot.written.saturating_add_signed(written);
        self.dirty.insert(node.0 / SLOTS_PER_BLOCK);
        // It let go of blocks that came to it from the node being taken apart, where they are counted to the end.
        if let Some(short) = short
            && let Some(reaping) = self.reaping.filter(|reaping| !reaping.thinning)
            && self.heirs(reaping.node).contains(&node)
            && let Some(slot) = self.slots.get_mut(&reaping.node)
        {
            slot.written = slot.written.saturating_add_signed(short);
            self.dirty.insert(reaping.node.0 / SLOTS_PER_BLOCK);
        }
    }

    /// A head wrote over `count` blocks that it had inherited. A ghost above it may hold them for nobody now.
    pub fn let_go(&mut self, head: NodeId, count: u64) {
        if let Some(parent) = self.parent(head)
            && self.is_ghost(parent)
        {
            *self.stale.entry(parent).or_default() += count;
        }
    }

    /// Ghosts of whose blocks some may be nobody's: how many at most, and how many blocks they have.
    pub fn stale(&self) -> Vec<(NodeId, u64, u64)> {
        self.stale.iter().map(|(node, count)| (*node, *count, self.slot(*node).written)).collect()
    }

    /// The epoch above which blocks in `node`'s tree belong to it alone, for a page or block whose leaves end
    /// before leaf `end`. While its parent is being taken apart, the part already passed counts as the grandparent's.
    pub fn floor(&self, node: NodeId, end: u64) -> Epoch {
        let mut at = self.parent(node);
        while let Some(id) = at {
            let passed = self.reaping.is_some_and(|r| r.node == id && !r.thinning && end <= r.cursor);
            if !passed && self.slot(id).root != Root::Reaped {
                return self.sealed(id);
            }
            at = self.parent(id);
        }
        0
    }

    /// A deleted node that must be dealt with before any other: one that is being worked on, or was taken apart here and
    /// perhaps not in other shards. Its parent would take it for an heir that has everything.
    pub fn begun(&self) -> Option<Reaping> {
        let reaped =
            || self.reaped.first().map(|node| Reaping { node: *node, cursor: LEAVES_MAX, thinning: false });
        self.reaping.or_else(reaped)
    }

    /// The reaping under way.
    pub fn reaping(&self) -> Option<Reaping> {
        self.reaping
    }

    /// Starts or moves on the reaping.
    pub fn set_reaping(&mut self, reaping: Option<Reaping>) {
        self.reaping = reaping;
    }

    /// Takes up the reaping of `node` where it was, or begins it. Returns the first leaf not yet passed.
    pub fn begin_reaping(&mut self, node: NodeId, thinning: bool) -> u64 {
        match self.reaping {
            Some(reaping) if reaping.node == node && reaping.thinning == thinning => reaping.cursor,
            _ => {
                self.stale.remove(&node);
                self.reaping = Some(Reaping { node, cursor: 0, thinning });
                0
            }
        }
    }

    /// Moves the reaping on.
    pub fn pass(&mut self, next: u64) {
        if let Some(reaping) = &mut self.reaping {
            reaping.cursor = next;
        }
    }

    /// All that `node` alone held is free now; the others of its written blocks are its child's.
    pub fn set_reaped(&mut self, node: NodeId) {
        let kept = self.slot(node).written as i64;
        for heir in self.heirs(node) {
            if let Root::Own(_) = self.slot(heir).root {
                self.count(heir, 0, kept);
            }
        }
        self.slots.insert(node, Slot { root: Root::Reaped, referenced: 0, written: 0 });
        self.reaped.insert(node);
        self.dirty.insert(node.0 / SLOTS_PER_BLOCK);
        self.reaping = None;
    }

    /// All records are to be written again.
    pub fn touch_all(&mut self) {
        let blocks: BTreeSet<u32> = self.slots.keys().map(|id| id.0 / SLOTS_PER_BLOCK).collect();
        self.dirty.extend(blocks);
    }

    /// Record blocks changed since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.dirty)
    }

    /// Record blocks changed.
    pub fn dirty_blocks(&self) -> usize {
        self.dirty.len()
    }

    /// Records kept.
    #[cfg(test)]
    pub fn records(&self) -> usize {
        self.slots.len()
    }

    /// Whether record block `index` has a record.
    pub fn has_records(&self, index: u32) -> bool {
        let first = index * SLOTS_PER_BLOCK;
        self.slots.range(NodeId(first)..=NodeId(first + (SLOTS_PER_BLOCK - 1))).next().is_some()
    }

    /// The stored form of record block `index`.
    pub fn encode(&self, index: u32) -> Vec<u8> {
        let mut raw = RawBlock::new_zeroed();
        let first = index * SLOTS_PER_BLOCK;
        for (id, slot) in self.slots.range(NodeId(first)..=NodeId(first + (SLOTS_PER_BLOCK - 1))) {
            let root = match slot.root {
                Root::Inherited => Pointer::EMPTY,
                Root::Own(pointer) => pointer,
                Root::Reaped => Pointer::hole(1),
            };
            raw.slots[(id.0 - first) as usize] = RawSlot {
                root: root.raw().into(),
                referenced: slot.referenced.into(),
                written: slot.written.into(),
            };
        }
        raw.as_bytes().to_vec()
    }

    /// Loads record block `index`; false when a root has flags that this format does not know.
    pub fn load(&mut self, index: u32, stored: &[u8]) -> bool {
        let Ok(raw) = RawBlock::ref_from_bytes(stored) else { return false };
        if index > u32::MAX / SLOTS_PER_BLOCK {
            return false;
        }
        for (i, slot) in raw.slots.iter().enumerate() {
            let root = Pointer::from_raw(slot.root.get());
            if root.flags() != 0 {
                return false;
            }
            let root = match (root.is_hole(), root.birth()) {
                (true, 0) => continue,
                (true, _) => Root::Reaped,
                (false, _) => Root::Own(root),
            };
            let id = NodeId(index * SLOTS_PER_BLOCK + i as u32);
            if root == Root::Reaped {
                self.reaped.insert(id);
            }
            self.slots
                .insert(id, Slot { root, referenced: slot.referenced.get(), written: slot.written.get() });
        }
        true
    }
}
