//! Reading everything that an open shard holds, a leaf at a time, while it is in use.
//!
//! Every page and block has one owner, the node that would free it, and is read when that node's turn comes. Each step
//! looks its way up from the root anew and keeps blocks from being used again only while it reads them, so nothing waits
//! for it. What is written after a step has passed is not seen by this sweep.
#![forbid(unsafe_code)]

use super::cache::{Missing, Object};
use super::damage::{DamageInfo, DamageState, Spot};
use super::finding::{Finding, Findings, HOLDERS_MAX, Kind, Names, Severity, Tally};
use super::node::NodeId;
use super::pointer::{FANOUT, LEAVES_MAX, LEVELS, Pointer};
use super::prove::Broken;
use super::shard::Shard;
use super::tree::State;
use crate::device::IoError;

/// Entries of the damage list for which all holders are looked up.
const LOOKUPS_MAX: usize = 100;
/// Trees that one such look-up goes through.
const TREES_MAX: usize = 4096;

/// What lies at one place of a node's own.
struct OwnLeaf {
    /// The first leaf not yet passed.
    next: u64,
    /// Its pages that begin here and are on the devices, as (pointer, height).
    pages: Vec<(Pointer, u32)>,
    /// Its blocks of data, by slot.
    data: Vec<(u64, Pointer)>,
}

/// What a step did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Step {
    /// The first leaf not yet passed.
    pub next: u64,
    /// Metadata blocks read, both copies counted.
    pub metadata: u64,
    /// Data blocks read.
    pub data: u64,
    /// Blocks that cannot be read.
    pub lost: u64,
    /// Copies written again.
    pub healed: u64,
}

impl State {
    fn own_leaf(&mut self, node: NodeId, cursor: u64) -> Result<OwnLeaf, Missing> {
        let mut found = OwnLeaf { next: cursor, pages: Vec::new(), data: Vec::new() };
        let mut pointer = self.nodes.root(node);
        for level in (0..LEVELS).rev() {
            found.next = ((cursor >> (8 * level)) + 1) << (8 * level);
            if pointer.is_hole() || pointer.birth() <= self.nodes.floor(node, found.next) {
                return Ok(found);
            }
            let Some(frame) = self.pages.find(pointer.block()) else {
                return Err(Missing { pointer, object: Object::Node(node), level });
            };
            if cursor.is_multiple_of(1 << (8 * level)) && self.pages.is_stored(pointer.block()) {
                found.pages.push((pointer, level + 1));
            }
            if level > 0 {
                let slot = (cursor >> (8 * (level - 1))) as usize % FANOUT;
                pointer = self.pages.page(frame).get(slot);
                continue;
            }
            let floor = self.nodes.floor(node, cursor + 1);
            let own = self.pages.page(frame).iter().enumerate();
            let own = own.filter(|(_, block)| !block.is_hole() && block.birth() > floor);
            found.data = own.map(|(slot, block)| (cursor * FANOUT as u64 + slot as u64, block)).collect();
        }
        Ok(found)
    }
}

impl Shard {
    /// The next node, from `from` on, that has a tree of its own.
    pub(super) fn next_own(&self, from: NodeId) -> Option<NodeId> {
        let state = self.state.borrow();
        state
            .nodes
            .own_roots()
            .into_iter()
            .map(|(id, _)| id)
            .find(|id| *id >= from && state.nodes.contains(*id))
    }

    /// Reads what is `node`'s own at `cursor`: pages in both copies, with `heal` a damaged one is written again, and
    /// blocks of data. What is damaged is kept as such.
    pub(super) async fn sweep(&self, node: NodeId, cursor: u64, heal: bool) -> Result<Step, IoError> {
        let guard = self.enter();
        let leaf = loop {
            self.check()?;
            let leaf = self.state.borrow_mut().own_leaf(node, cursor);
            match leaf {
                Ok(leaf) => break leaf,
                Err(missing) => {
                    if let Err(error) = self.load(missing).await {
                        self.check()?;
                        return match error {
                            IoError::Gone | IoError::Internal(_) => Err(error),
                            _ => Ok(self.pass_over(node, cursor, missing)),
                        };
                    }
                }
            }
        };
        let mut step = Step { next: leaf.next, ..Step::default() };
        for (pointer, height) in leaf.pages {
            step.metadata += 2;
            let spot = Spot { node, height, slot: cursor * FANOUT as u64, count: 1 << (8 * height) };
            step.healed += self.sweep_page(pointer, spot, heal).await;
        }
        let pointers: Vec<Pointer> = leaf.data.iter().map(|(_, pointer)| *pointer).collect();
        step.data = pointers.len() as u64;
        for (at, why) in self.bad_blocks(&pointers).await {
            let (slot, pointer) = leaf.data[at];
            let spot = Spot { node, height: 0, slot, count: 1 };
            let what = format!("data block {why}");
            self.damaged(
                Kind::Data,
                DamageState::Lost,
                pointer.block(),
                what,
                Some(spot),
                Some(pointer.birth()),
            );
            step.lost += 1;
        }
        drop(guard);
        Ok(step)
    }

    /// A page is lost in both copies: all below it is passed over.
    fn pass_over(&self, node: NodeId, cursor: u64, missing: Missing) -> Step {
        let leaves = 1u64 << (8 * missing.level);
        let first = cursor / leaves * leaves;
        let spot = Spot {
            node,
            height: missing.level + 1,
            slot: first * FANOUT as u64,
            count: leaves * FANOUT as u64,
        };
        let what = "metadata block is damaged in both copies".to_owned();
        let (block, birth) = (missing.pointer.block(), missing.pointer.birth());
        self.damaged(Kind::Page, DamageState::Lost, block, what, Some(spot), Some(birth));
        Step { next: first + leaves, metadata: 2, lost: 1, ..Step::default() }
    }

    /// Both copies of a page that is in memory. Returns how many were written again.
    async fn sweep_page(&self, pointer: Pointer, spot: Spot, heal: bool) -> u64 {
        let first = pointer.block();
        let copies = [Some(first), self.state.borrow().space.twin(first)];
        let bytes = self.read_copies(copies).await;
        let fits = |bytes: &Option<crate::memory::DmaBuf>| {
            bytes.as_ref().is_some_and(|bytes| crate::crc32c::crc32c(bytes) == pointer.crc())
        };
        let bad: Vec<_> = copies
            .iter()
            .zip(&bytes)
            .filter(|(_, bytes)| !fits(bytes))
            .filter_map(|(block, _)| *block)
            .collect();
        if bad.is_empty() {
            return 0;
        }
        let good = bytes.into_iter().find(fits).flatten().or_else(|| self.page_in_memory(pointer));
        let mut healed = 0;
        for block in bad {
            let done = match &good {
                Some(good) => heal && self.rewrite(block, good, pointer.crc()).await,
                None => false,
            };
            healed += u64::from(done);
            let (kind, state, what) = match (done, &good) {
                (true, _) => {
                    (Kind::Metadata, DamageState::Healed, "metadata block was damaged; it was written again")
                }
                (false, Some(_)) => {
                    (Kind::Metadata, DamageState::Degraded, "metadata block is damaged in one copy")
                }
                (false, None) => (Kind::Page, DamageState::Lost, "metadata block is damaged in both copies"),
            };
            self.damaged(kind, state, block, what.to_owned(), Some(spot), Some(pointer.birth()));
        }
        healed
    }

    /// Reads every block of data, for a check.
    pub(super) async fn check_data(&self, names: &Names, findings: &mut Findings) -> Result<Tally, Broken> {
        let mut tally = Tally::default();
        let mut from = NodeId(0);
        while let Some(node) = self.next_own(from) {
            let mut cursor = 0;
            while cursor < LEAVES_MAX {
                let step = self.sweep(node, cursor, false).await.map_err(|_| Broken::Gone)?;
                cursor = step.next;
                tally.data += step.data;
                crate::reactor::yield_now().await;
            }
            from = NodeId(node.0 + 1);
        }
        for info in self.damage_infos(names).await {
            if info.state == DamageState::Lost && matches!(info.kind, Kind::Data) {
                let finding = Finding::new(Severity::Lost, info.kind, info.what)
                    .costs("these blocks would read as zeroes");
                let finding =
                    finding.of_shard(self.index).at(&info.place.device, info.place.offset, info.place.length);
                findings.push(Finding { extents: info.extents, ..finding });
            }
        }
        Ok(tally)
    }

    /// The damage found so far, with everyone who has it now. What nobody has any more is forgotten.
    pub(super) async fn damage_infos(&self, names: &Names) -> Vec<DamageInfo> {
        let known: Vec<_> = self.damage.borrow().iter().cloned().collect();
        let mut infos = Vec::with_capacity(known.len());
        let mut lookups = 0;
        for damage in known {
            let mut extents = Vec::new();
            if let (Some(spot), Some(epoch)) = (damage.spot, damage.epoch) {
                lookups += 1;
                let holders = match lookups <= LOOKUPS_MAX {
                    true => self.holders(spot, epoch, damage.place.offset).await,
                    false => None,
                };
                if damage.state == DamageState::Lost && holders.as_ref().is_some_and(Vec::is_empty) {
                    self.damage.borrow_mut().forget(&damage.place, damage.kind);
                    continue;
                }
                for node in holders.unwrap_or_else(|| vec![spot.node]) {
                    extents.extend(names.extents(node, self.index, spot.slot, spot.count));
                }
            }
            infos.push(DamageInfo {
                kind: damage.kind,
                state: damage.state,
                what: damage.what,
                place: damage.place,
                shard: self.index,
                extents,
                epoch: damage.epoch,
                since: damage.since,
                times: damage.times,
            });
        }
        infos
    }

    /// The nodes whose trees have the block of that birth and offset at that place; `None` when that cannot be told.
    async fn holders(&self, spot: Spot, birth: u64, offset: u64) -> Option<Vec<NodeId>> {
        // In the tree of a ghost much is void, and nobody reads it.
        let nodes: Vec<NodeId> = {
            let nodes = &self.state.borrow().nodes;
            nodes.iter().filter(|node| !nodes.is_ghost(*node)).collect()
        };
        let mut answers = std::collections::HashMap::new();
        let mut holders = Vec::new();
        for node in nodes {
            let root = self.state.borrow_mut().nodes.root(node);
            let holds = match answers.get(&root.block()) {
                Some(holds) => *holds,
                None if answers.len() >= TREES_MAX => return None,
                None => {
                    let at = self.pointer_at(node, spot).await?;
                    let holds = !at.is_hole() && at.birth() == birth && self.is_at(at, offset);
                    answers.insert(root.block(), holds);
                    holds
                }
            };
            if holds {
                holders.push(node);
                if holders.len() == HOLDERS_MAX {
                    break;
                }
            }
        }
        Some(holders)
    }

    /// Whether either copy of what a pointer names begins at that byte of its device.
    fn is_at(&self, pointer: Pointer, offset: u64) -> bool {
        let twin = self.state.borrow().space.twin(pointer.block());
        pointer.block().offset() == offset || twin.is_some_and(|twin| twin.offset() == offset)
    }

    async fn pointer_at(&self, node: NodeId, spot: Spot) -> Option<Pointer> {
        let guard = self.enter();
        let mut pointer = self.state.borrow_mut().nodes.root(node);
        for level in (spot.height..LEVELS).rev() {
            if pointer.is_hole() {
                break;
            }
            let page = loop {
                let found = {
                    let mut state = self.state.borrow_mut();
                    let frame = state.pages.find(pointer.block());
                    frame.map(|frame| state.pages.page(frame).clone())
                };
                match found {
                    Some(page) => break page,
                    None => self.load(Missing { pointer, object: Object::Node(node), level }).await.ok()?,
                }
            };
            pointer = page.get((spot.slot >> (8 * level)) as usize % FANOUT);
        }
        drop(guard);
        crate::reactor::yield_now().await;
        Some(pointer)
    }
}
