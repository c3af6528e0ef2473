//! Nodes as one shard sees them: where each node's tree starts, and which blocks it owns.
//!
//! A *node* is a volume's head or a snapshot. A head that is sealed becomes a snapshot, and a new head with the
//! sealed one as its parent goes on; nothing is copied. A node that never wrote in this shard has no root of its
//! own here and inherits its parent's, so a clone, a snapshot and a rollback cost a shard nothing.
//!
//! **Ownership.** A block with `birth > epoch(parent)` belongs to its node alone and is freed when overwritten; an
//! older one belongs to an ancestor. [`Nodes::floor`] is that epoch.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use zerocopy::little_endian::{U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::pointer::{BLOCK_BYTES, Epoch, Pointer};

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
    slots: BTreeMap<NodeId, Slot>,
    dirty: BTreeSet<u32>,
    /// For a node that inherits: the ancestor that owned the root when it was last looked for.
    hints: BTreeMap<NodeId, NodeId>,
    /// The node being reaped and the first leaf not yet reaped.
    reaping: Option<(NodeId, u64)>,
}

impl Nodes {
    /// Tells the shard about a node, or about its changed lineage.
    pub fn set_lineage(&mut self, node: NodeId, lineage: Lineage) {
        self.lineage.insert(node, lineage);
        self.hints.remove(&node);
    }

    /// Forgets a node that the catalog no longer has.
    pub fn forget(&mut self, node: NodeId) {
        self.lineage.remove(&node);
        self.hints.remove(&node);
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
        self.lineage.iter().filter(move |(_, l)| l.parent == Some(node)).map(|(id, _)| *id)
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

    /// Blocks (referenced, written) of every node, in order. A parent comes before its children.
    pub fn counts(&self) -> Vec<(NodeId, u64, u64)> {
        let mut referenced: HashMap<NodeId, u64> = HashMap::with_capacity(self.lineage.len());
        let mut counts = Vec::with_capacity(self.lineage.len());
        for (id, lineage) in &self.lineage {
            let slot = self.slot(*id);
            let names = match slot.root {
                Root::Inherited => lineage.parent.and_then(|id| referenced.get(&id).copied()).unwrap_or(0),
                _ => slot.referenced,
            };
            referenced.insert(*id, names);
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
        if let Some(slot) = self.slots.get_mut(&node) {
            slot.referenced = slot.referenced.saturating_add_signed(referenced);
            slot.written = slot.written.saturating_add_signed(written);
            self.dirty.insert(node.0 / SLOTS_PER_BLOCK);
        }
    }

    /// The epoch above which blocks in `node`'s tree belong to it alone, for a page or block whose leaves end
    /// before leaf `end`. While its parent is being reaped, the part already passed counts as the grandparent's.
    pub fn floor(&self, node: NodeId, end: u64) -> Epoch {
        let mut at = self.parent(node);
        while let Some(id) = at {
            let passed = self.reaping.is_some_and(|(reaping, cursor)| reaping == id && end <= cursor);
            if !passed && self.slot(id).root != Root::Reaped {
                return self.lineage.get(&id).and_then(|lineage| lineage.sealed).unwrap_or(0);
            }
            at = self.parent(id);
        }
        0
    }

    /// The reaping under way: the node and the first leaf not yet passed.
    pub fn reaping(&self) -> Option<(NodeId, u64)> {
        self.reaping
    }

    /// Starts or moves on the reaping.
    pub fn set_reaping(&mut self, reaping: Option<(NodeId, u64)>) {
        self.reaping = reaping;
    }

    /// All that `node` alone held is free now; `freed` of its written blocks went, the others are its child's.
    pub fn set_reaped(&mut self, node: NodeId, freed: u64) {
        let kept = self.slot(node).written.saturating_sub(freed) as i64;
        let heirs: Vec<NodeId> = self.children(node).collect();
        for heir in heirs {
            if let Root::Own(_) = self.slot(heir).root {
                self.count(heir, 0, kept);
            }
        }
        self.slots.insert(node, Slot { root: Root::Reaped, referenced: 0, written: 0 });
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
            self.slots
                .insert(id, Slot { root, referenced: slot.referenced.get(), written: slot.written.get() });
        }
        true
    }
}
