//! The proof that a pool's metadata is whole: blocks in use = blocks that the trees name, each tree's pages fit
//! their checksums in both copies, and every count is what a full walk finds.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::cache::Object;
use super::error::PoolError;
use super::home::Home;
use super::node::Root;
use super::pointer::{BLOCK_BYTES, Block, FANOUT, LEVELS, Page, Pointer};
use super::shard::Shard;
use crate::device::IoError;
use crate::memory::DmaBuf;

impl Home {
    /// What is wrong; nothing when all is well. Writes wait meanwhile.
    pub async fn verify(&self) -> Result<Vec<String>, PoolError> {
        let _lock = self.operations.acquire(1).await;
        let volumes: Vec<_> = self.records.borrow().volumes().map(|(id, _)| id).collect();
        let mut wrong = Vec::new();
        let checked = self
            .owners
            .each(move |shard| async move {
                shard.commit().await?;
                while shard.state.borrow().is_dirty() {
                    shard.commit().await?;
                }
                shard.fence(&volumes);
                let found = shard.verify().await;
                shard.open_fence(&volumes);
                found
            })
            .await?;
        for shard in checked {
            wrong.extend(shard?);
        }
        Ok(wrong)
    }
}

/// What a walk over everything found.
#[derive(Default)]
struct Found {
    named: BTreeMap<Block, u32>,
    /// Metadata blocks, both copies.
    metadata: BTreeSet<Block>,
    wrong: Vec<String>,
}

impl Shard {
    /// Walks every tree of this shard. The caller holds the fence, so nothing changes meanwhile.
    pub async fn verify(&self) -> Result<Vec<String>, IoError> {
        let mut found = Found::default();
        self.verify_into(&mut found).await?;
        Ok(found.wrong)
    }

    /// The root and journal blocks that recovery would read; of a shard at rest also those of its trees.
    #[cfg(test)]
    pub async fn live_metadata(&self) -> Vec<Block> {
        let mut found = Found::default();
        if !self.state.borrow().is_dirty() {
            self.verify_into(&mut found).await.unwrap();
        }
        let (slot, journal) = {
            let state = self.state.borrow();
            ((state.generation - 1) % 2, state.journal.live())
        };
        for copy in 0..2u64 {
            let vdev = (u64::from(self.index) + copy) % self.devices.len() as u64;
            found.metadata.insert(Block::new(vdev as u8, self.geometry.root_slot(copy, self.index, slot)));
            let start = self.geometry.journal(copy, self.index);
            let size = u64::from(self.geometry.journal_blocks);
            found.metadata.extend(journal.clone().map(|at| Block::new(vdev as u8, start + at % size)));
        }
        found.metadata.into_iter().collect()
    }

    async fn verify_into(&self, found: &mut Found) -> Result<(), IoError> {
        let roots: Vec<_> = {
            let mut state = self.state.borrow_mut();
            let nodes: Vec<_> = state.nodes.iter().collect();
            let own = nodes.into_iter().filter_map(|node| match state.nodes.slot(node).root {
                Root::Own(root) => Some((node, root)),
                _ => None,
            });
            let mut roots: Vec<_> = own.map(|(node, root)| (Object::Node(node), root)).collect();
            for object in [Object::Nodes, Object::Space] {
                let root = state.root(object);
                roots.push((object, root));
            }
            roots
        };
        let reaping = self.state.borrow().nodes.reaping();
        for (object, root) in roots {
            let from = match (object, reaping) {
                (Object::Node(node), Some(r)) if node == r.node && !r.thinning => r.cursor,
                _ => 0,
            };
            let data = self.verify_tree(object, root, from, found).await?;
            if let Object::Node(node) = object {
                let counted = self.state.borrow().nodes.slot(node).referenced;
                let ghost = self.state.borrow().nodes.is_ghost(node);
                if from == 0 && !ghost && counted != data {
                    let shard = self.index;
                    found.wrong.push(format!(
                        "shard {shard}: node {} is counted to refer to {counted} blocks, but refers to {data}",
                        node.0
                    ));
                }
            }
        }
        let state = self.state.borrow();
        let used: BTreeSet<Block> = state.space.used_blocks().collect();
        for block in found.named.keys().filter(|block| !used.contains(block)) {
            found.wrong.push(format!("shard {}: block {block:?} is named by a tree but free", self.index));
        }
        for block in used.iter().filter(|block| !found.named.contains_key(block)) {
            found.wrong.push(format!("shard {}: block {block:?} is in use but no tree names it", self.index));
        }
        Ok(())
    }

    /// Visits the pages of one tree that were not visited yet. Returns the blocks of data that the tree names.
    async fn verify_tree(
        &self,
        object: Object,
        root: Pointer,
        from: u64,
        found: &mut Found,
    ) -> Result<u64, IoError> {
        let mut data = 0;
        let mut stack = vec![(root, LEVELS, 0u64)];
        while let Some((pointer, level, index)) = stack.pop() {
            // `index` counts units of 256^level slots; what ends before `from` leaves was taken apart already.
            let end_leaf = match level {
                0 => index / FANOUT as u64 + 1,
                level => (index + 1) << (8 * (level - 1)),
            };
            let void = match object {
                Object::Node(node) => self.state.borrow().nodes.void_below(node, end_leaf),
                Object::Nodes | Object::Space => 0,
            };
            if pointer.is_hole() || end_leaf <= from || pointer.birth() <= void {
                continue;
            }
            *found.named.entry(pointer.block()).or_insert(0) += 1;
            let is_page = level > 0;
            if !is_page && matches!(object, Object::Node(_)) {
                data += 1;
                continue;
            }
            let Some(bytes) = self.verify_copies(pointer, found).await? else { continue };
            if is_page && let Some(page) = Page::parse(&bytes) {
                stack.extend(
                    page.iter()
                        .enumerate()
                        .map(|(slot, below)| (below, level - 1, index * FANOUT as u64 + slot as u64)),
                );
            }
        }
        Ok(data)
    }

    /// Both copies of a metadata block; the bytes of a good one.
    async fn verify_copies(&self, pointer: Pointer, found: &mut Found) -> Result<Option<DmaBuf>, IoError> {
        let first = pointer.block();
        let second = self.state.borrow().space.twin(first);
        let mut good = None;
        for (copy, block) in [Some(first), second].into_iter().enumerate() {
            let Some(block) = block else {
                found
                    .wrong
                    .push(format!("shard {}: metadata block {first:?} has no second copy", self.index));
                continue;
            };
            found.metadata.insert(block);
            let (result, bytes) = self.device(block)?.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
            if result.is_ok() && crc32c::crc32c(&bytes) == pointer.crc() {
                good = Some(bytes);
            } else {
                found.wrong.push(format!(
                    "shard {}: copy {copy} of the metadata block at byte {} of {} is damaged",
                    self.index,
                    block.offset(),
                    self.device(block)?.info().uri
                ));
            }
        }
        Ok(good)
    }
}
