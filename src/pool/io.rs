//! Reads and writes of one shard's part of a volume. All in whole 4 KiB blocks within one leaf page, except
//! [`Shard::write_partial`].
//!
//! A write goes: reserve blocks → data to the device → map them (in memory) → record in the journal → acknowledge.
//! The map changes only after the data is on the device, so a reader never sees a pointer to what is not there, and
//! of two writes at once to one block the one that finishes last wins whole.
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::cache::Object;
use super::damage::{DamageState, Spot};
use super::finding::Kind;
use super::journal::Record;
use super::node::NodeId;
use super::pointer::{BLOCK_BYTES, Block, FANOUT, Pointer};
use super::sabotage::{Sabotage, is};
use super::shard::Shard;
use super::space::{Ask, Use};
use super::tree::{Extent, Reserve, VolumeId};
use crate::device::IoError;
use crate::memory::{DmaBuf, DmaSlice};

/// Free data blocks that new writes leave for overwrites.
pub(super) const OVERWRITE_RESERVE: u64 = 64;
/// What is written at a time over that reserve.
const OVERWRITE_BYTES: usize = 32 * BLOCK_BYTES;

/// What a read reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A volume as it is now.
    Volume(VolumeId),
    /// A snapshot.
    Node(NodeId),
}

/// Adjacent slots that lie side by side on the device, or are holes.
struct Run {
    first: usize,
    count: usize,
    block: Block,
}

impl Shard {
    fn node_of(&self, source: Source) -> Result<NodeId, IoError> {
        let state = self.state.borrow();
        match source {
            Source::Volume(volume) => {
                state.volumes.get(&volume).map(|volume| volume.head).ok_or(IoError::Gone)
            }
            Source::Node(node) => state.nodes.contains(node).then_some(node).ok_or(IoError::Gone),
        }
    }

    /// The pointers of `count` slots from `slot` on, within one leaf; `None` when the leaf is a hole.
    async fn pointers<T>(
        &self,
        source: Source,
        slot: u64,
        look: impl Fn(&super::pointer::Page) -> T,
    ) -> Result<Option<T>, IoError> {
        loop {
            self.check()?;
            let node = self.node_of(source)?;
            let missing = {
                let mut state = self.state.borrow_mut();
                let root = state.nodes.root(node);
                match state.find_leaf(Object::Node(node), root, slot / FANOUT as u64) {
                    Ok(None) => return Ok(None),
                    Ok(Some(frame)) => return Ok(Some(look(state.pages.page(frame)))),
                    Err(missing) => missing,
                }
            };
            self.load(missing).await?;
        }
    }

    /// Fills `buf` (whole blocks, within one leaf) from `slot` on.
    pub async fn read(&self, source: Source, slot: u64, mut buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        let guard = self.enter();
        self.served.set(self.served.get() + 1);
        let (first, count) = ((slot % FANOUT as u64) as usize, buf.len() / BLOCK_BYTES);
        if count == 1 {
            return match self.pointers(source, slot, |page| page.get(first)).await {
                Ok(pointer) => self.read_block(source, slot, pointer.unwrap_or(Pointer::EMPTY), buf).await,
                Err(error) => (Err(error), buf),
            };
        }
        let look =
            |page: &super::pointer::Page| page.iter().skip(first).take(count).collect::<Vec<Pointer>>();
        let pointers = match self.pointers(source, slot, look).await {
            Ok(Some(pointers)) => pointers,
            Ok(None) => {
                buf.fill(0);
                return (Ok(()), buf);
            }
            Err(error) => return (Err(error), buf),
        };
        let runs = runs_of(&pointers);
        if let [run] = runs.as_slice() {
            return self.read_run(source, slot, run, &pointers, buf).await;
        }
        let mut parts = Vec::with_capacity(runs.len());
        for run in &runs {
            parts.push((run, buf.split_to(run.count * BLOCK_BYTES)));
        }
        let reads = parts.into_iter().map(|(run, part)| self.read_run(source, slot, run, &pointers, part));
        let mut result = Ok(());
        let mut whole: Option<DmaBuf> = None;
        for (outcome, part) in super::join::all(reads).await {
            result = result.and(outcome);
            match &mut whole {
                Some(whole) => whole.unsplit(part),
                None => whole = Some(part),
            }
        }
        drop(guard);
        (result, whole.unwrap_or(buf))
    }

    /// Reads a run of the pointers that begin at `slot`.
    async fn read_run(
        &self,
        source: Source,
        slot: u64,
        run: &Run,
        pointers: &[Pointer],
        mut buf: DmaBuf,
    ) -> (Result<(), IoError>, DmaBuf) {
        if run.block == Block::HOLE {
            buf.fill(0);
            return (Ok(()), buf);
        }
        let device = match self.device(run.block) {
            Ok(device) => device,
            Err(error) => return (Err(error), buf),
        };
        let (result, mut buf) = device.read(run.block.offset(), buf).await;
        let wrong = match result {
            Err(_) => true,
            Ok(()) => {
                let blocks = buf.chunks_exact(BLOCK_BYTES).zip(&pointers[run.first..]);
                blocks.into_iter().any(|(block, pointer)| crate::crc32c::crc32c(block) != pointer.crc())
            }
        };
        if wrong {
            let pointers = &pointers[run.first..][..run.count];
            if let Some(error) = self.read_singly(source, slot + run.first as u64, pointers, &mut buf).await {
                buf.fill(0);
                return (Err(error), buf);
            }
        }
        (Ok(()), buf)
    }

    async fn read_block(
        &self,
        source: Source,
        slot: u64,
        pointer: Pointer,
        buf: DmaBuf,
    ) -> (Result<(), IoError>, DmaBuf) {
        let run = Run { first: 0, count: 1, block: pointer.block() };
        self.read_run(source, slot, &run, &[pointer], buf).await
    }

    /// Reads each block of a read that failed alone. What is bad then too is kept as damage, and the first of it is the
    /// error.
    async fn read_singly(
        &self,
        source: Source,
        slot: u64,
        pointers: &[Pointer],
        buf: &mut DmaBuf,
    ) -> Option<IoError> {
        let mut first = None;
        for (at, (pointer, out)) in pointers.iter().zip(buf.chunks_exact_mut(BLOCK_BYTES)).enumerate() {
            let block = pointer.block();
            let (result, bytes) = match self.device(block) {
                Ok(device) => device.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await,
                Err(error) => return Some(error),
            };
            let (why, error) = match result {
                Ok(()) if crate::crc32c::crc32c(&bytes) == pointer.crc() => {
                    out.copy_from_slice(&bytes);
                    continue;
                }
                Ok(()) => ("does not fit its checksum", IoError::Unrecovered { offset: block.offset() }),
                // The device went away or was closed: that says nothing of this block.
                Err(error @ (IoError::Gone | IoError::Internal(_))) => return Some(error),
                Err(error) => ("cannot be read", error),
            };
            let node = self.node_of(source).ok();
            let spot = node.map(|node| Spot { node, height: 0, slot: slot + at as u64, count: 1 });
            let what = format!("data block {why}");
            self.damaged(Kind::Data, DamageState::Lost, block, what, spot, Some(pointer.birth()));
            first.get_or_insert(error);
        }
        first
    }

    /// Writes whole blocks within one leaf. Acknowledged means: the data is on the device and mapped in memory.
    pub async fn write(&self, volume: VolumeId, slot: u64, data: DmaSlice) -> Result<(), IoError> {
        match self.write_if(volume, slot, data.clone(), None).await {
            // In a full pool a long overwrite goes on in pieces, each over what the one before set free.
            Err(IoError::CapacityExceeded) if data.len() > OVERWRITE_BYTES => {
                let (mut at, mut rest) = (slot, data);
                while !rest.is_empty() {
                    let piece = rest.split_to(rest.len().min(OVERWRITE_BYTES));
                    let blocks = (piece.len() / BLOCK_BYTES) as u64;
                    self.write_if(volume, at, piece, None).await?;
                    at += blocks;
                }
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    /// As [`write`](Shard::write), of one block, unless its pointer is no longer `unless_changed`. False then.
    async fn write_if(
        &self,
        volume: VolumeId,
        slot: u64,
        data: DmaSlice,
        unless_changed: Option<Pointer>,
    ) -> Result<bool, IoError> {
        self.served.set(self.served.get() + 1);
        let crcs: SmallVec<[u32; 4]> = data.chunks_exact(BLOCK_BYTES).map(crate::crc32c::crc32c).collect();
        let count = crcs.len() as u32;
        let (extents, _turn) = match self.reserve(count, OVERWRITE_RESERVE).await {
            Err(IoError::CapacityExceeded) if data.len() <= OVERWRITE_BYTES => {
                let turn = self.overwrite_lock.acquire(1).await;
                self.check_exclusive(volume, slot, count).await?;
                (self.reserve(count, 0).await?, Some(turn))
            }
            reserved => (reserved?, None),
        };
        let written = self.write_extents(&extents, &data).await;
        let mapped = match written {
            Ok(()) => self.map(volume, slot, &extents, &crcs, unless_changed).await,
            Err(error) => Err(error),
        };
        if !matches!(mapped, Ok(true)) {
            self.cancel(&extents);
        }
        if self.wants_commit() {
            self.wake.notify();
        }
        mapped
    }

    fn cancel(&self, extents: &[Extent]) {
        let mut state = self.state.borrow_mut();
        for extent in extents {
            for i in 0..u64::from(extent.count) {
                state.space.cancel(extent.block.add(i));
            }
        }
    }

    async fn write_extents(&self, extents: &[Extent], data: &DmaSlice) -> Result<(), IoError> {
        if let [extent] = extents {
            return self.device(extent.block)?.write(extent.block.offset(), data.clone()).await;
        }
        let mut at = 0;
        let mut writes = Vec::with_capacity(extents.len());
        for extent in extents {
            let end = at + extent.count as usize * BLOCK_BYTES;
            writes.push(self.device(extent.block)?.write(extent.block.offset(), data.slice(at..end)));
            at = end;
        }
        super::join::all(writes.into_iter()).await.into_iter().collect()
    }

    /// Blocks for a write, `kept` of the shard's left over.
    async fn reserve(&self, count: u32, kept: u64) -> Result<SmallVec<[Extent; 2]>, IoError> {
        let mut extents = SmallVec::new();
        let mut wanted = count;
        while wanted > 0 {
            self.check()?;
            if !self.scarce.get() && self.state.borrow().space.wants_fresh(Use::Data) {
                let fresh = self.grow(Use::Data, Ask::Plenty).await;
                self.scarce.set(!fresh);
            }
            let got = {
                let mut state = self.state.borrow_mut();
                let spare = state.space.free_blocks(Use::Data).saturating_sub(kept);
                match wanted.min(spare.min(u64::from(u32::MAX)) as u32) {
                    0 => None,
                    room => state.space.reserve(Use::Data, room),
                }
            };
            if let Some((block, count)) = got {
                extents.push(Extent { block, count });
                wanted -= count;
            } else if let Err(error) = self.make_space(Use::Data).await {
                self.cancel(&extents);
                return Err(error);
            }
        }
        Ok(extents)
    }

    /// Refuses a write that would not set free as much as it takes: in a full pool only others go on.
    async fn check_exclusive(&self, volume: VolumeId, slot: u64, count: u32) -> Result<(), IoError> {
        let (first, count) = ((slot % FANOUT as u64) as usize, count as usize);
        let node = self.node_of(Source::Volume(volume))?;
        let floor = self.state.borrow().nodes.floor(node, slot / FANOUT as u64 + 1);
        let exclusive = self
            .pointers(Source::Volume(volume), slot, |page| {
                page.iter().skip(first).take(count).all(|old| !old.is_hole() && old.birth() > floor)
            })
            .await?;
        if exclusive == Some(true) { Ok(()) } else { Err(IoError::CapacityExceeded) }
    }

    async fn map(
        &self,
        volume: VolumeId,
        slot: u64,
        extents: &[Extent],
        crcs: &[u32],
        unless_changed: Option<Pointer>,
    ) -> Result<bool, IoError> {
        let leaf = slot / FANOUT as u64;
        loop {
            self.check()?;
            let need = {
                let mut state = self.state.borrow_mut();
                let state = &mut *state;
                let target = state.volumes.get(&volume).ok_or(IoError::Gone)?;
                if target.held {
                    None
                } else {
                    let node = target.head;
                    match state.prepare(Object::Node(node), leaf, Reserve::Write) {
                        Ok(()) => {
                            if let Some(expected) = unless_changed {
                                let root = state.nodes.root(node);
                                let found = state.find_leaf(Object::Node(node), root, leaf).ok().flatten();
                                let now = found.map_or(Pointer::EMPTY, |frame| {
                                    state.pages.page(frame).get((slot % FANOUT as u64) as usize)
                                });
                                if now != expected {
                                    return Ok(false);
                                }
                            }
                            let before = state.nodes.referenced(node);
                            let (mut at, epoch) = (0, state.epoch);
                            for extent in extents {
                                let crcs = &crcs[at..at + extent.count as usize];
                                let first = slot + at as u64;
                                state
                                    .map(node, first, *extent, epoch, crcs)
                                    .map_err(|error| self.fail_space(error))?;
                                state.journal.append_map(node, first, extent.block, epoch, crcs);
                                self.stage(&state.journal);
                                at += extent.count as usize;
                            }
                            state.account(volume, node, before);
                            return Ok(true);
                        }
                        Err(need) => Some(need),
                    }
                }
            };
            match need {
                None => self.changed.wait().await,
                Some(need) => self.meet(need).await?,
            }
        }
    }

    /// Writes part of one block: what is there already is read and merged. Tried again when the block changed
    /// meanwhile, so neighbouring writes within one block never undo each other.
    pub async fn write_partial(
        &self,
        volume: VolumeId,
        slot: u64,
        offset: usize,
        data: &[u8],
    ) -> Result<(), IoError> {
        let at = (slot % FANOUT as u64) as usize;
        loop {
            let guard = self.enter();
            let look = |page: &super::pointer::Page| page.get(at);
            let old = self.pointers(Source::Volume(volume), slot, look).await?.unwrap_or(Pointer::EMPTY);
            let (result, mut block) =
                self.read_block(Source::Volume(volume), slot, old, DmaBuf::uninit(BLOCK_BYTES)).await;
            drop(guard);
            result?;
            block[offset..offset + data.len()].copy_from_slice(data);
            if self.write_if(volume, slot, block.freeze(), Some(old)).await? {
                return Ok(());
            }
        }
    }

    /// Writes bytes that begin `within` bytes into block `slot` and stay within one leaf.
    pub async fn write_bytes(
        &self,
        volume: VolumeId,
        slot: u64,
        within: usize,
        mut data: DmaSlice,
    ) -> Result<(), IoError> {
        if within == 0 && data.len().is_multiple_of(BLOCK_BYTES) {
            return self.write(volume, slot, data).await;
        }
        let (mut slot, mut within) = (slot, within);
        while !data.is_empty() {
            if within == 0 && data.len() >= BLOCK_BYTES {
                let whole = data.split_to(data.len() / BLOCK_BYTES * BLOCK_BYTES);
                let blocks = (whole.len() / BLOCK_BYTES) as u64;
                self.write(volume, slot, whole).await?;
                slot += blocks;
                continue;
            }
            let piece = data.split_to(data.len().min(BLOCK_BYTES - within));
            self.write_partial(volume, slot, within, &piece).await?;
            slot += 1;
            within = 0;
        }
        Ok(())
    }

    /// Makes holes of `count` slots from `slot` on, any number of leaves; what the volume alone held is freed.
    pub async fn unmap(&self, volume: VolumeId, slot: u64, count: u64) -> Result<(), IoError> {
        let end = slot + count;
        let mut at = slot;
        let mut steps = 0u32;
        while at < end {
            self.check()?;
            let leaf = at / FANOUT as u64;
            let upto = end.min((leaf + 1) * FANOUT as u64);
            let need = {
                let mut state = self.state.borrow_mut();
                let state = &mut *state;
                let target = state.volumes.get(&volume).ok_or(IoError::Gone)?;
                if target.held {
                    Err(None)
                } else {
                    let node = target.head;
                    match state.prepare(Object::Node(node), leaf, Reserve::Trim) {
                        Ok(()) => {
                            let (count, epoch) = ((upto - at) as usize, state.epoch);
                            let before = state.nodes.referenced(node);
                            let changed = state
                                .unmap(node, at, count, epoch)
                                .map_err(|error| self.fail_space(error))?;
                            if changed {
                                let record =
                                    Record::Unmap { node, slot: at, count: count as u16, birth: epoch };
                                if !is(Sabotage::ForgetTrim) {
                                    state.journal.append(&record);
                                }
                                self.stage(&state.journal);
                                state.account(volume, node, before);
                            }
                            let root = state.nodes.root(node);
                            Ok(match changed {
                                true => upto,
                                false => state.next_leaf(root, leaf) * FANOUT as u64,
                            })
                        }
                        Err(need) => Err(Some(need)),
                    }
                }
            };
            match need {
                Ok(next) => at = next.max(upto),
                Err(None) => self.changed.wait().await,
                Err(Some(need)) => self.meet(need).await?,
            }
            steps += 1;
            if steps.is_multiple_of(64) {
                if self.wants_commit() {
                    self.wake.notify();
                }
                crate::reactor::yield_now().await;
            }
        }
        if self.wants_commit() {
            self.wake.notify();
        }
        Ok(())
    }
}

fn runs_of(pointers: &[Pointer]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::with_capacity(2);
    for (i, pointer) in pointers.iter().enumerate() {
        let block = pointer.block();
        if let Some(last) = runs.last_mut() {
            let continues = match last.block {
                Block::HOLE => block == Block::HOLE,
                first => first.raw() + last.count as u64 == block.raw(),
            };
            if continues {
                last.count += 1;
                continue;
            }
        }
        runs.push(Run { first: i, count: 1, block });
    }
    runs
}
