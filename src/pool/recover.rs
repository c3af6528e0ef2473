//! Opening a shard: the newest whole root, then the journal up to its first block that is not whole.
//!
//! Time is bounded by the shard's bitmaps and its journal, not by what the pool holds.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use uuid::Uuid;

use super::cache::{Missing, Object};
use super::journal::{JournalBlock, Record, decode_block};
use super::label::Geometry;
use super::node::{Lineage, NodeId};
use super::pointer::{BLOCK_BYTES, Block, Epoch, FANOUT, LEVELS, Pointer};
use super::root::RootRecord;
use super::sabotage::{Sabotage, is};
use super::shard::Shard;
use super::space::{RegionId, RegionKind};
use super::tree::{Extent, Need, Reserve, State, VolumeId, VolumeState};
use crate::device::{Device, IoError};
use crate::memory::DmaBuf;

/// Blocks of the journal whose pages are loaded side by side.
const BLOCKS_AHEAD: usize = 16;
/// Records and bitmaps that are read side by side.
const RECORDS_AT_ONCE: usize = 64;

/// What the catalog knows of a shard.
pub struct Known {
    /// Its regions.
    pub regions: Vec<(RegionId, RegionKind)>,
    /// All nodes of the pool.
    pub nodes: Vec<(NodeId, Lineage)>,
    /// All volumes and their heads.
    pub volumes: Vec<(VolumeId, NodeId, Arc<AtomicU64>)>,
}

/// Why a shard could not be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RecoverError {
    /// No root slot is whole.
    #[error("shard {shard} has no readable root: all copies of both slots are damaged")]
    NoRoot {
        /// The shard.
        shard: u16,
    },
    /// A metadata block contradicts what leads to it.
    #[error("shard {shard}: {what}")]
    Contradiction {
        /// The shard.
        shard: u16,
        /// What is wrong.
        what: String,
    },
    /// The device failed, or a block is damaged in both copies.
    #[error("shard {shard}: {source}")]
    Io {
        /// The shard.
        shard: u16,
        /// The error.
        source: IoError,
    },
}

/// Where a shard lives and how much memory it may use for pages.
#[derive(Clone)]
pub struct Place {
    /// The pool.
    pub pool: Uuid,
    /// The shard.
    pub shard: u16,
    /// The devices in vdev order.
    pub devices: Rc<[Device]>,
    /// The fixed places.
    pub geometry: Geometry,
    /// Clean pages to keep in memory.
    pub page_limit: usize,
}

impl Shard {
    /// Writes the first commit of a new pool's shard.
    pub async fn create(place: Place, known: Known) -> Result<Shard, RecoverError> {
        let state = State::new(place.pool, place.shard, place.geometry, place.page_limit, 0);
        let shard = Shard::new(place.pool, place.devices, place.geometry, state);
        shard.learn(&known);
        shard.open_stage();
        let io = |source| RecoverError::Io { shard: place.shard, source };
        // Whatever these places held before must not be taken for this pool's.
        for (copy, device) in shard.copies().into_iter().enumerate() {
            for slot in 0..2 {
                let block = place.geometry.root_slot(copy as u64, place.shard, slot);
                device
                    .write(block * BLOCK_BYTES as u64, DmaBuf::zeroed(BLOCK_BYTES).freeze())
                    .await
                    .map_err(io)?;
            }
        }
        {
            let mut state = shard.state.borrow_mut();
            // Nothing is dirty yet: the empty record of the node that is never used makes the first commit.
            state.nodes.touch(NodeId(0));
        }
        shard.commit().await.map_err(io)?;
        Ok(shard)
    }

    /// Opens a shard of an existing pool.
    pub async fn open(place: Place, known: Known) -> Result<Shard, RecoverError> {
        let index = place.shard;
        let io = |source| RecoverError::Io { shard: index, source };
        let root = Shard::blank(&place).find_root().await?;
        let shard = Shard::at_root(&place, &known, &root);
        shard.open_stage();
        shard.load_records(Object::Nodes).await?;
        shard.state.borrow_mut().nodes.forget_unknown();
        shard.load_records(Object::Space).await?;
        shard.replay(root.journal).await?;
        match shard.commit().await {
            // Without metadata space the journal stays as it is; the pool's reserve will let a later commit pass.
            Ok(()) => Ok(shard),
            Err(IoError::CapacityExceeded) => {
                shard.replayed.set(true);
                Ok(shard)
            }
            Err(error) => Err(io(error)),
        }
    }

    /// A shard of which nothing is known but its place.
    pub fn blank(place: &Place) -> Shard {
        let state = State::new(place.pool, place.shard, place.geometry, place.page_limit, 0);
        Shard::new(place.pool, place.devices.clone(), place.geometry, state)
    }

    /// A shard as a root says it is, before its records were read and its journal was replayed.
    pub fn at_root(place: &Place, known: &Known, root: &RootRecord) -> Shard {
        let mut state = State::new(place.pool, place.shard, place.geometry, place.page_limit, root.journal);
        state.adopt(root);
        let shard = Shard::new(place.pool, place.devices.clone(), place.geometry, state);
        shard.durable_generation.set(root.generation);
        shard.committed.set(Some(*root));
        shard.learn(known);
        shard
    }

    fn learn(&self, known: &Known) {
        let mut state = self.state.borrow_mut();
        for (id, kind) in &known.regions {
            state.space.add(*id, *kind);
        }
        for (node, lineage) in &known.nodes {
            state.nodes.set_lineage(*node, *lineage);
        }
        for (volume, head, referenced) in &known.volumes {
            let volume_state = VolumeState { head: *head, held: false, referenced: Arc::clone(referenced) };
            state.volumes.insert(*volume, volume_state);
        }
    }

    fn contradiction(&self, what: impl Into<String>) -> RecoverError {
        RecoverError::Contradiction { shard: self.index, what: what.into() }
    }

    fn io(&self) -> impl Fn(IoError) -> RecoverError + use<> {
        let shard = self.index;
        move |source| RecoverError::Io { shard, source }
    }

    /// The newest whole root. A copy that differs from its twin is named: damaged, or older, which is what a crash
    /// between the two leaves.
    async fn find_root(&self) -> Result<RootRecord, RecoverError> {
        let copies = self.root_copies().await;
        for slot in 0..2 {
            let of_slot = || copies.iter().filter(|copy| copy.slot == slot);
            let newest = of_slot().filter_map(|copy| copy.root).max_by_key(|root| root.generation);
            for copy in of_slot().filter(|copy| newest.is_some() && copy.root != newest) {
                let at = format!("at byte {} of {}", copy.offset, self.copies()[copy.copy].info().uri);
                match copy.root {
                    None => self.report(format!(
                        "root of shard {} {at} is damaged; its other copy was used",
                        self.index
                    )),
                    Some(_) => self.note_unfinished(format!(
                        "root of shard {} {at} is older than its other copy, as after a crash; the other was used",
                        self.index
                    )),
                }
            }
        }
        let newest = copies.iter().filter_map(|copy| copy.root).max_by_key(|root| root.generation);
        newest.ok_or(RecoverError::NoRoot { shard: self.index })
    }

    /// Loads all node records or all bitmaps. Their pages stay in memory.
    pub(super) async fn load_records(&self, object: Object) -> Result<(), RecoverError> {
        let root = self.state.borrow_mut().root(object);
        let mut stack = Vec::new();
        if !root.is_hole() {
            stack.push((root, LEVELS, 0u64));
        }
        // A sound tree names each block once; a hostile one could make a few blocks look like millions.
        let mut met = HashSet::new();
        // Many side by side: there is a bitmap for each region, and a large pool has thousands.
        while !stack.is_empty() {
            let some = stack.split_off(stack.len().saturating_sub(RECORDS_AT_ONCE));
            if let Some((twice, ..)) = some.iter().find(|(pointer, ..)| !met.insert(pointer.block())) {
                return Err(self.contradiction(format!("metadata block {:?} is named twice", twice.block())));
            }
            let reads = some.iter().map(|(pointer, ..)| self.read_metadata(*pointer));
            for ((pointer, level, index), bytes) in some.iter().zip(super::join::all(reads).await) {
                let bytes = bytes.map_err(self.io())?;
                if *level == 0 {
                    self.take_record(object, *index as u32, &bytes)?;
                    continue;
                }
                let page = super::pointer::Page::parse(&bytes)
                    .ok_or_else(|| self.contradiction("a page has flags that this format does not know"))?;
                let below = page.iter().enumerate().filter(|(_, pointer)| !pointer.is_hole());
                stack.extend(
                    below.map(|(slot, pointer)| (pointer, level - 1, index * FANOUT as u64 + slot as u64)),
                );
                self.state.borrow_mut().pages.insert_clean(pointer.block(), page, object, level - 1);
            }
        }
        Ok(())
    }

    fn take_record(&self, object: Object, index: u32, bytes: &[u8]) -> Result<(), RecoverError> {
        let mut state = self.state.borrow_mut();
        match object {
            Object::Nodes if !state.nodes.load(index, bytes) => {
                Err(self.contradiction(format!("node record {index} is not of this format")))
            }
            Object::Space => {
                state.space.load(RegionId(index), bytes).map_err(|what| self.contradiction(what))
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn replay(&self, from: u64) -> Result<(), RecoverError> {
        let blocks = self.read_journal(from).await?;
        let durable = blocks.last().map_or(from, |block| block.durable);
        let mut renamed: HashMap<NodeId, NodeId> = HashMap::new();
        let mut newest: Epoch = self.state.borrow().epoch;
        let mut blocks = blocks.into_iter().peekable();
        while blocks.peek().is_some() {
            let some: Vec<JournalBlock> = blocks.by_ref().take(BLOCKS_AHEAD).collect();
            self.load_ahead(&some, &renamed).await;
            for block in some {
                let certain = block.sequence < durable;
                // One after the other, a journal's worth of small reads would take seconds.
                let arrived = match certain {
                    true => block.records.iter().map(|_| Ok(true)).collect(),
                    false => {
                        super::join::all(block.records.iter().map(|record| self.has_arrived(record))).await
                    }
                };
                for (record, arrived) in block.records.into_iter().zip(arrived) {
                    newest = newest.max(self.replay_record(record, arrived, &mut renamed).await?);
                }
            }
        }
        self.state.borrow_mut().epoch = newest;
        Ok(())
    }

    /// Brings the pages into memory that some blocks of the journal are about, side by side. What fails here is met
    /// again when the record is applied.
    async fn load_ahead(&self, blocks: &[JournalBlock], renamed: &HashMap<NodeId, NodeId>) {
        let leaves: BTreeSet<(NodeId, u64)> = blocks
            .iter()
            .flat_map(|block| &block.records)
            .filter_map(|record| match record {
                Record::Map { node, slot, .. } | Record::Unmap { node, slot, .. } => {
                    Some((resolve(*node, renamed), slot / FANOUT as u64))
                }
                Record::Seal { .. } => None,
            })
            .filter(|(node, _)| self.state.borrow().nodes.contains(*node))
            .collect();
        // A root may be far up the line of a node, so it is looked for once.
        let roots: HashMap<NodeId, Pointer> = {
            let state = self.state.borrow();
            leaves
                .iter()
                .map(|(node, _)| *node)
                .collect::<BTreeSet<_>>()
                .into_iter()
                .map(|node| (node, state.nodes.root_for_now(node)))
                .collect()
        };
        // A level at a time, from the top: many leaves are below few pages.
        for _ in 0..LEVELS {
            let missing: BTreeMap<Block, Missing> = leaves
                .iter()
                .filter_map(|(node, leaf)| {
                    self.state.borrow_mut().find_leaf(Object::Node(*node), roots[node], *leaf).err()
                })
                .map(|missing| (missing.pointer.block(), missing))
                .collect();
            if missing.is_empty() || self.load_all(missing.into_values().collect()).await.is_err() {
                return;
            }
        }
    }

    /// The journal's blocks from `from` on, up to the first that is whole in neither copy nor in the stage.
    async fn read_journal(&self, from: u64) -> Result<Vec<JournalBlock>, RecoverError> {
        let size = u64::from(self.geometry.journal_blocks);
        let mut rings = Vec::new();
        for (copy, device) in self.copies().into_iter().enumerate() {
            let start = self.geometry.journal(copy as u64, self.index) * BLOCK_BYTES as u64;
            rings.push(super::copy::read(device, start, size as usize * BLOCK_BYTES).await);
        }
        let at = |copy: usize, sequence: u64| {
            let place = (sequence % size) as usize * BLOCK_BYTES;
            decode_block(self.pool, self.index, &rings[copy][place..place + BLOCK_BYTES])
                .filter(|block| block.sequence == sequence)
        };
        let mut blocks: Vec<JournalBlock> = Vec::new();
        let mut differ = Vec::new();
        let mut sequence = from;
        while sequence < from + size {
            let found = [at(0, sequence), at(1, sequence)];
            if found[0] != found[1] {
                differ.push((sequence, usize::from(found[0].is_some())));
            }
            let [first, second] = found;
            let Some(block) = first.or(second).or_else(|| self.staged(sequence)) else { break };
            blocks.push(block);
            sequence += 1;
        }
        // What was not flushed yet may be in one copy alone after a crash; what was must be in both.
        let durable = blocks.last().map_or(from, |block| block.durable);
        for (sequence, bad) in differ {
            let what = format!("journal block {sequence} of shard {} in copy {bad} is", self.index);
            match sequence < durable {
                true => self.report(format!("{what} damaged or missing; its other copy was used")),
                false => {
                    self.note_unfinished(format!(
                        "{what} not whole, as after a crash; its other copy was used"
                    ));
                }
            }
        }
        // Blocks written side by side may be torn by a power cut, so a later one alone proves nothing; one that was
        // written after this one had been flushed does.
        let later = (sequence + 1..from + size).filter_map(|later| at(0, later).or_else(|| at(1, later)));
        if later.into_iter().any(|block| block.durable > sequence) {
            return Err(self.contradiction(format!(
                "journal block {sequence} is damaged in both copies while later blocks are there; \
                 importing would lose acknowledged writes"
            )));
        }
        // A whole lap is passed over, so that no such block can ever be taken for a later one.
        self.state.borrow_mut().journal.skip_to(from + size);
        Ok(blocks)
    }

    /// Applies one record; what it maps must have `arrived`. Returns its epoch.
    async fn replay_record(
        &self,
        record: Record,
        arrived: Result<bool, RecoverError>,
        renamed: &mut HashMap<NodeId, NodeId>,
    ) -> Result<Epoch, RecoverError> {
        let known = |node: NodeId| self.state.borrow().nodes.contains(node);
        match record {
            Record::Seal { node, successor, epoch } => {
                if !known(successor) {
                    renamed.insert(successor, node);
                }
                Ok(epoch)
            }
            Record::Map { node, slot, block, birth, crcs } => {
                let node = resolve(node, renamed);
                // A node that the catalog no longer has was deleted; so was all that was written to it.
                if known(node) && arrived? && self.make_ready(node, slot).await? {
                    let extent = Extent { block, count: crcs.len() as u32 };
                    let mut state = self.state.borrow_mut();
                    // Pages are born when they were the first time, or they would change owners.
                    state.epoch = birth;
                    let mapped = state.map(node, slot, extent, birth, &crcs);
                    drop(state);
                    mapped.map_err(|error| self.contradiction(format!("replay: {error}")))?;
                }
                Ok(birth)
            }
            Record::Unmap { node, slot, count, birth } => {
                let node = resolve(node, renamed);
                if known(node) && self.make_ready(node, slot).await? {
                    let mut state = self.state.borrow_mut();
                    state.epoch = birth;
                    let unmapped = state.unmap(node, slot, usize::from(count), birth);
                    drop(state);
                    unmapped.map_err(|error| self.contradiction(format!("replay: {error}")))?;
                }
                Ok(birth)
            }
        }
    }

    /// Loads the way to a slot. False when it is lost in both copies: so is what would be found at its end, and the
    /// rest of the pool must not wait for it.
    async fn make_ready(&self, node: NodeId, slot: u64) -> Result<bool, RecoverError> {
        loop {
            let prepared =
                self.state.borrow_mut().prepare(Object::Node(node), slot / FANOUT as u64, Reserve::Replay);
            match prepared {
                Ok(()) | Err(Need::Commit) => return Ok(true),
                Err(Need::Load(missing)) => match self.load(missing).await {
                    Err(IoError::Unrecovered { .. }) => {
                        self.report(format!(
                            "shard {}: a write to node {} after the last commit is lost with the page that leads to it",
                            self.index, node.0
                        ));
                        return Ok(false);
                    }
                    loaded => loaded.map_err(self.io())?,
                },
                Err(Need::Metadata) => {
                    return Err(self.contradiction("no metadata space is left to replay the journal"));
                }
            }
        }
    }

    async fn has_arrived(&self, record: &Record) -> Result<bool, RecoverError> {
        match record {
            Record::Map { block, crcs, .. } => self.data_arrived(*block, crcs).await,
            Record::Seal { .. } | Record::Unmap { .. } => Ok(true),
        }
    }

    /// Whether the data that a record maps is what it was when the record was made.
    async fn data_arrived(&self, block: Block, crcs: &[u32]) -> Result<bool, RecoverError> {
        let device = self.device(block).map_err(self.io())?;
        let buf = DmaBuf::uninit(crcs.len() * BLOCK_BYTES);
        let (result, bytes) = device.read(block.offset(), buf).await;
        result.map_err(self.io())?;
        if is(Sabotage::TrustRecords) {
            return Ok(true);
        }
        Ok(bytes.chunks_exact(BLOCK_BYTES).zip(crcs).all(|(block, crc)| crate::crc32c::crc32c(block) == *crc))
    }
}

/// The node that a record of `node` is about: its successor's seal may be all there is of a snapshot.
fn resolve(mut node: NodeId, renamed: &HashMap<NodeId, NodeId>) -> NodeId {
    while let Some(next) = renamed.get(&node) {
        node = *next;
    }
    node
}
