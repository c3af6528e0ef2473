//! A shard: one part of a pool, owned by one reactor, with its own trees, space, journal and commits. Nothing in it
//! is ever touched by another core, so nothing in it is locked; what must wait, waits on [`Shard::changed`].
//!
//! What survives a crash: the last commit, plus every journal block that reached the devices; when only this process
//! died, also what its [`Stage`] holds.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use uuid::Uuid;

use super::cache::Missing;
use super::damage::{Damage, DamageLog, DamageState, Spot};
use super::finding::{Kind, Place};
use super::journal::{Journal, JournalBlock, decode_block};
use super::label::Geometry;
use super::node::{Lineage, NodeId};
use super::pointer::{BLOCK_BYTES, Block, Epoch, Page, Pointer};
use super::root::RootRecord;
use super::sabotage::{Sabotage, is};
use super::space::{Ask, RegionId, RegionKind, SpaceError, Use};
use super::stage::Stage;
use super::tree::{Need, State, VolumeId, VolumeState};
use crate::device::{Device, DeviceKind, IoError};
use crate::memory::DmaBuf;
use crate::reactor::sync::{Event, Semaphore};

/// A future that a [`Regions`] hands out.
pub type Answer<T> = Pin<Box<dyn Future<Output = T>>>;

/// Journal blocks for the seals of one operation; writes leave them free.
const SEAL_BLOCKS: u64 = 8;
/// Pages read side by side.
const LOADS_AT_ONCE: usize = 64;
/// When what found no room on a device is tried again.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of a shard waits for its devices.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// What a shard asks of its pool when it runs out of space, or gives back.
pub trait Regions {
    /// More regions of a kind, durable in the catalog; none when the pool has no more, or not as many as asked for.
    fn grant(&self, shard: u16, what: Use, ask: Ask) -> Answer<Vec<(RegionId, RegionKind)>>;
    /// Empty regions that the shard no longer uses.
    fn give_back(&self, shard: u16, regions: Vec<RegionId>) -> Answer<()>;
}

/// A shard that is open.
pub struct Shard {
    pub(super) pool: Uuid,
    pub(super) index: u16,
    pub(super) devices: Rc<[Device]>,
    pub(super) geometry: Geometry,
    pub(super) state: RefCell<State>,
    /// Something happened that waiters may be waiting for: a commit ended, space came, a fence opened.
    pub(super) changed: Event,
    /// The background committer has work.
    pub(super) wake: Event,
    pub(super) commit_lock: Semaphore,
    pub(super) commits: super::commit::Requests,
    /// Whoever writes in a full pool goes one at a time, over blocks that its own overwriting sets free.
    pub(super) overwrite_lock: Semaphore,
    journal_lock: Semaphore,
    grant_lock: Semaphore,
    /// Commits must wait: a snapshot is between its fence and its catalog record.
    pub(super) commit_hold: Cell<u32>,
    /// Journal records that the commit under way makes durable.
    pub(super) commit_covers: Cell<u64>,
    /// The last durable commit.
    pub(super) durable_generation: Cell<u64>,
    /// Reads under way, by the generation in which they began.
    reads: RefCell<VecDeque<(u64, u32)>>,
    regions: RefCell<Option<Rc<dyn Regions>>>,
    /// Texts that name what else went wrong.
    notes: RefCell<Vec<String>>,
    /// What a crash left in one of two copies alone.
    pub(super) unfinished: RefCell<Vec<String>>,
    /// Damage found, and what was done.
    pub(super) damage: RefCell<DamageLog>,
    /// The last commit did not take over what was replayed: it is in memory and perhaps in the stage, and no later part of
    /// the journal says so.
    pub(super) replayed: Cell<bool>,
    /// The last durable commit, as its root slot has it.
    pub(super) committed: Cell<Option<RootRecord>>,
    /// Checks under way, which keep freed blocks from being used again.
    pinned: Cell<u32>,
    /// Writes wait for such blocks.
    pressed: Cell<bool>,
    /// Damaged copies are written again when they are met.
    pub(super) heals: Cell<bool>,
    /// Set by the first error after which the shard in memory can no longer be trusted.
    fault: Cell<Option<&'static str>>,
    pub(super) closed: Cell<bool>,
    /// The pool is being closed: nobody waits for better times.
    pub(super) closing: Cell<bool>,
    /// Writes under way.
    pub(super) writes: Cell<u32>,
    /// Reads and writes of hosts so far, by which the background sees that it is not alone.
    pub(super) served: Cell<u64>,
    /// Where the journal's newest records outlive this process; none when the devices do not either.
    stage: RefCell<Option<Stage>>,
    /// The pool has no region left for this shard; cleared when space returns.
    pub(super) full: Cell<bool>,
    /// The pool has no plenty of regions left; cleared when space returns.
    pub(super) scarce: Cell<bool>,
}

/// A write under way.
pub(super) struct WriteGuard<'a>(&'a Shard);

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        self.0.writes.set(self.0.writes.get() - 1);
        if self.0.closed.get() {
            self.0.changed.notify();
        }
    }
}

/// Keeps the blocks that a read may look at from being written again.
pub(super) struct ReadGuard<'a> {
    shard: &'a Shard,
    generation: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut reads = self.shard.reads.borrow_mut();
        let Some((_, count)) = reads.iter_mut().find(|(generation, _)| *generation == self.generation) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            reads.retain(|(_, count)| *count > 0);
            drop(reads);
            if self.shard.closed.get() {
                self.shard.changed.notify();
            }
            if self.generation <= self.shard.durable_generation.get() {
                self.shard.release();
            }
        }
    }
}

impl Shard {
    /// A shard around a state that was created or recovered.
    pub(super) fn new(pool: Uuid, devices: Rc<[Device]>, geometry: Geometry, state: State) -> Shard {
        Shard {
            pool,
            index: state.shard,
            devices,
            geometry,
            durable_generation: Cell::new(state.generation - 1),
            state: RefCell::new(state),
            changed: Event::new(),
            wake: Event::new(),
            commit_lock: Semaphore::new(1),
            commits: super::commit::Requests::default(),
            overwrite_lock: Semaphore::new(1),
            journal_lock: Semaphore::new(1),
            grant_lock: Semaphore::new(1),
            commit_hold: Cell::new(0),
            commit_covers: Cell::new(0),
            reads: RefCell::default(),
            regions: RefCell::new(None),
            notes: RefCell::default(),
            unfinished: RefCell::default(),
            damage: RefCell::default(),
            replayed: Cell::new(false),
            committed: Cell::new(None),
            pinned: Cell::new(0),
            pressed: Cell::new(false),
            heals: Cell::new(true),
            fault: Cell::new(None),
            closed: Cell::new(false),
            closing: Cell::new(false),
            writes: Cell::new(0),
            served: Cell::new(0),
            stage: RefCell::new(None),
            full: Cell::new(false),
            scarce: Cell::new(false),
        }
    }

    /// Opens the stage. Without one the shard works, but a kill of this process loses what was not flushed.
    pub(super) fn open_stage(&self) {
        if self.devices.iter().any(|device| device.info().kind != DeviceKind::Uring) {
            return;
        }
        match Stage::open(self.pool, self.index) {
            Ok(stage) => *self.stage.borrow_mut() = Some(stage),
            Err(error) => self.lose_stage(&error),
        }
    }

    /// Looks at a stage that an earlier process left behind, and leaves it as it is.
    pub(super) fn peek_stage(&self) {
        *self.stage.borrow_mut() = Stage::peek(self.pool, self.index);
    }

    fn lose_stage(&self, error: &std::io::Error) {
        self.stage.borrow_mut().take();
        self.report(format!(
            "shard {} has no stage in shared memory, so a kill of Rimrock would lose writes that were not flushed: \
             {error}",
            self.index
        ));
    }

    /// What the stage holds at `sequence`.
    pub(super) fn staged(&self, sequence: u64) -> Option<JournalBlock> {
        let bytes = self.stage.borrow().as_ref()?.read(sequence % u64::from(self.geometry.journal_blocks))?;
        decode_block(self.pool, self.index, &bytes).filter(|block| block.sequence == sequence)
    }

    /// Puts the record that was appended last where it outlives this process. Only then may it be acknowledged.
    pub(super) fn stage(&self, journal: &Journal) {
        let stage = self.stage.borrow();
        let Some(file) = stage.as_ref() else { return };
        let mut block = [0; BLOCK_BYTES];
        let sequence = journal.encode_open(&mut block);
        if let Err(error) = file.write(sequence % journal.size(), &block) {
            drop(stage);
            self.lose_stage(&error);
        }
    }

    /// The shard was closed and all is on the devices.
    pub(super) fn remove_stage(&self) {
        if let Some(stage) = self.stage.borrow_mut().take() {
            stage.remove();
        }
    }

    /// Connects the shard to its pool.
    pub(super) fn set_regions(&self, regions: Rc<dyn Regions>) {
        *self.regions.borrow_mut() = Some(regions);
    }

    /// What went wrong since the shard was opened, damage last.
    pub fn damage(&self) -> Vec<String> {
        let mut texts = self.notes.borrow().clone();
        texts.extend(self.damage.borrow().texts());
        texts
    }

    pub(super) fn report(&self, text: String) {
        tracing::warn!(pool = %self.pool, shard = self.index, "{text}");
        let mut notes = self.notes.borrow_mut();
        if notes.len() < 1000 && !notes.contains(&text) {
            notes.push(text.clone());
            self.damage.borrow_mut().tell(text);
        }
    }

    /// Keeps what a crash may have left. It is made whole by the commit that ends the import; a root slot by the next one.
    pub(super) fn note_unfinished(&self, text: String) {
        tracing::info!(pool = %self.pool, shard = self.index, "{text}");
        self.unfinished.borrow_mut().push(text);
    }

    /// Keeps damage that was come upon. What is known already is only counted.
    pub(super) fn damaged(
        &self,
        kind: Kind,
        state: DamageState,
        block: Block,
        what: String,
        spot: Option<Spot>,
        epoch: Option<Epoch>,
    ) {
        let uri = self.devices.get(block.vdev()).map_or("?", |device| device.info().uri.as_str());
        let place = Place { device: uri.to_owned(), offset: block.offset(), length: BLOCK_BYTES as u64 };
        self.keep_damage(kind, state, place, what, spot, epoch);
    }

    /// As [`damaged`](Shard::damaged), of what no tree leads to.
    pub(super) fn damaged_at(&self, kind: Kind, state: DamageState, place: Place, what: String) {
        self.keep_damage(kind, state, place, what, None, None);
    }

    fn keep_damage(
        &self,
        kind: Kind,
        state: DamageState,
        place: Place,
        what: String,
        spot: Option<Spot>,
        epoch: Option<Epoch>,
    ) {
        let since = crate::reactor::unix_now();
        let what = format!("{what} (byte {} of {})", place.offset, place.device);
        let news = what.clone();
        let damage = Damage { kind, state, place, spot, epoch, what, since, seen: since, times: 1 };
        if self.damage.borrow_mut().add(damage) {
            tracing::warn!(pool = %self.pool, shard = self.index, "{news}");
        }
    }

    /// Keeps everything that the last commit names from being written over, until [`unpin`](Shard::unpin). Gives that
    /// commit's root.
    pub(super) async fn pin(&self) -> Result<(RootRecord, u64), IoError> {
        let _idle = self.commit_lock.acquire(1).await;
        self.check()?;
        let root = self.committed.get().ok_or(IoError::Gone)?;
        let guard = self.enter();
        let generation = guard.generation;
        std::mem::forget(guard);
        self.pinned.set(self.pinned.get() + 1);
        Ok((root, generation))
    }

    /// Ends what [`pin`](Shard::pin) began.
    pub(super) fn unpin(&self, generation: u64) {
        self.pinned.set(self.pinned.get().saturating_sub(1));
        if self.pinned.get() == 0 {
            self.pressed.set(false);
        }
        drop(ReadGuard { shard: self, generation });
    }

    /// Whether a check keeps freed blocks from being used again.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned.get() > 0
    }

    /// Whether writes wait for blocks that a check keeps.
    pub(super) fn is_pressed(&self) -> bool {
        self.pressed.get()
    }

    /// The shard cannot go on: what is in memory and what is on the devices no longer fit together.
    pub(super) fn fail(&self, why: &'static str) -> IoError {
        if self.fault.get().is_none() {
            self.fault.set(Some(why));
            self.report(format!("shard {} stopped: {why}", self.index));
        }
        self.changed.notify();
        IoError::Internal(why)
    }

    pub(super) fn fail_space(&self, error: SpaceError) -> IoError {
        self.report(error.to_string());
        self.fail("the space bitmap contradicts the tree")
    }

    pub(super) fn check(&self) -> Result<(), IoError> {
        match self.fault.get() {
            Some(why) => Err(IoError::Internal(why)),
            None if self.closed.get() => Err(IoError::Gone),
            None => Ok(()),
        }
    }

    pub(super) fn enter(&self) -> ReadGuard<'_> {
        let generation = self.state.borrow().generation;
        let mut reads = self.reads.borrow_mut();
        match reads.back_mut() {
            Some((newest, count)) if *newest == generation => *count += 1,
            _ => reads.push_back((generation, 1)),
        }
        ReadGuard { shard: self, generation }
    }

    pub(super) fn begin_write(&self) -> WriteGuard<'_> {
        self.writes.set(self.writes.get() + 1);
        WriteGuard(self)
    }

    /// Ends all work on the devices: nothing begins any more, and what is under way is waited for, though not for ever.
    /// The stage is not needed any more when everything is on the devices.
    pub(super) async fn end(&self, clean: bool) {
        self.closed.set(true);
        self.changed.notify();
        self.wake.notify();
        let _idle = self.commit_lock.acquire(1).await;
        let until = crate::reactor::now() + CLOSE_WAIT;
        while self.writes.get() > 0 || !self.reads.borrow().is_empty() {
            if crate::reactor::with_deadline(until, self.changed.wait()).await.is_none() {
                tracing::warn!("shard {} closes while its devices still owe answers", self.index);
                break;
            }
        }
        if clean {
            self.remove_stage();
        }
    }

    /// Lets freed blocks be used again as far as commits and reads allow.
    pub(super) fn release(&self) {
        let oldest = self.reads.borrow().front().map_or(u64::MAX, |(generation, _)| *generation);
        let oldest = if is(Sabotage::ForgetReads) { u64::MAX } else { oldest };
        let upto = self.durable_generation.get().min(oldest.saturating_sub(1));
        if self.state.borrow_mut().space.release(upto) > 0 {
            self.full.set(false);
            self.changed.notify();
        }
    }

    /// Brings a page into memory.
    pub(super) async fn load(&self, missing: Missing) -> Result<(), IoError> {
        self.load_all(vec![missing]).await
    }

    /// Brings pages into memory, several side by side, all at once so that none makes way for another.
    pub(super) async fn load_all(&self, missing: Vec<Missing>) -> Result<(), IoError> {
        let guard = self.enter();
        let mut pages = Vec::with_capacity(missing.len());
        for some in missing.chunks(LOADS_AT_ONCE) {
            let reads = some.iter().map(|missing| self.read_metadata(missing.pointer));
            for (missing, bytes) in some.iter().zip(super::join::all(reads).await) {
                let page = Page::parse(&bytes?)
                    .ok_or(IoError::Unrecovered { offset: missing.pointer.block().offset() })?;
                pages.push((*missing, page));
            }
        }
        self.state.borrow_mut().pages.insert_clean_all(pages);
        drop(guard);
        Ok(())
    }

    /// Reads a metadata block; a damaged first copy is healed from the second.
    pub(super) async fn read_metadata(&self, pointer: Pointer) -> Result<DmaBuf, IoError> {
        let first = pointer.block();
        let second = self.state.borrow().space.twin(first);
        let mut failure = IoError::Unrecovered { offset: first.offset() };
        for (copy, block) in [Some(first), second].into_iter().flatten().enumerate() {
            let device = self.device(block)?;
            let (result, bytes) = device.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
            match result {
                Ok(()) if crate::crc32c::crc32c(&bytes) == pointer.crc() => {
                    if copy == 1 {
                        self.heal(first, &bytes, pointer).await;
                    }
                    return Ok(bytes);
                }
                Ok(()) => {}
                Err(error) => failure = error,
            }
        }
        let what = "metadata block is damaged in both copies".to_owned();
        self.damaged(Kind::Page, DamageState::Lost, first, what, None, Some(pointer.birth()));
        Err(failure)
    }

    /// Writes a damaged first copy again.
    async fn heal(&self, first: Block, good: &[u8], pointer: Pointer) {
        let healed = self.heals.get() && self.rewrite(first, good, pointer.crc()).await;
        let (state, done) = match healed {
            true => (DamageState::Healed, "it was written again from its second copy"),
            false => (DamageState::Degraded, "its second copy was used; it could not be written again"),
        };
        let what = format!("metadata block is damaged; {done}");
        self.damaged(Kind::Metadata, state, first, what, None, Some(pointer.birth()));
    }

    /// The device that a block lies on; a pointer may name one that is not there.
    pub(super) fn device(&self, block: Block) -> Result<&Device, IoError> {
        self.devices.get(block.vdev()).ok_or(IoError::Unrecovered { offset: block.offset() })
    }

    /// The devices that hold the two copies of this shard's root and journal.
    pub(super) fn copies(&self) -> [&Device; 2] {
        let home = |copy: usize| &self.devices[(usize::from(self.index) + copy) % self.devices.len()];
        [home(0), home(1)]
    }

    pub(super) async fn flush_devices(&self) -> Result<(), IoError> {
        flush_all(&self.devices).await
    }

    /// Tries again, for as long as the shard is open, what fails because the file system below has no room left: an
    /// operator can make some. Reads go on meanwhile, and writes that find room.
    pub(super) async fn patiently<F>(&self, what: &str, work: impl Fn() -> F) -> Result<(), IoError>
    where
        F: Future<Output = Result<(), IoError>>,
    {
        let mut told = false;
        loop {
            let done = work().await;
            if done != Err(IoError::CapacityExceeded) || self.closing.get() {
                return done;
            }
            if !std::mem::replace(&mut told, true) {
                let devices: Vec<&str> =
                    self.devices.iter().map(|device| device.info().uri.as_str()).collect();
                tracing::error!(
                    "{what} of shard {} waits for room below the pool's devices ({}): make some",
                    self.index,
                    devices.join(", ")
                );
            }
            crate::reactor::sleep(PATIENCE).await;
        }
    }

    /// Writes all journal records so far. Returns what [`mark_durable`](Shard::mark_durable) takes after the devices
    /// were flushed; `None` when everything is durable already.
    pub async fn write_journal(&self) -> Result<Option<(u64, u64)>, IoError> {
        if self.replayed.get() {
            self.commit().await?;
        }
        let target = self.state.borrow().journal.appended();
        let lock = self.journal_lock.acquire(1).await;
        loop {
            self.check()?;
            if self.state.borrow().journal.durable() >= target {
                return Ok(None);
            }
            // Records that a commit has taken over are not in the ring. Until its root is durable, what comes after
            // them would be cut off from what recovery reads.
            if self.commit_covers.get() == 0 {
                break;
            }
            self.changed.wait().await;
        }
        let batch = self.state.borrow_mut().journal.take_batch();
        if let Some(batch) = batch {
            let size = self.state.borrow().journal.size();
            let blocks = (batch.bytes.len() / BLOCK_BYTES) as u64;
            let at = batch.first % size;
            let (head, tail) = batch.bytes.split_at(blocks.min(size - at) as usize * BLOCK_BYTES);
            let mut writes = Vec::with_capacity(4);
            for (copy, device) in self.copies().into_iter().enumerate() {
                let start = self.geometry.journal(copy as u64, self.index);
                for (place, part) in [(at, head), (0, tail)] {
                    if !part.is_empty() {
                        let data = DmaBuf::copy_of(part).freeze();
                        writes.push(device.write((start + place) * BLOCK_BYTES as u64, data));
                    }
                }
            }
            for written in super::join::all(writes.into_iter()).await {
                written.map_err(|_| self.fail("the journal could not be written"))?;
            }
            self.state.borrow_mut().journal.batch_written(&batch);
        }
        drop(lock);
        Ok(Some(self.state.borrow().journal.mark()))
    }

    /// The devices were flushed after [`write_journal`](Shard::write_journal) returned `mark`.
    pub fn mark_durable(&self, mark: (u64, u64)) {
        self.state.borrow_mut().journal.mark_durable(mark);
    }

    /// Whether every change so far outlives a power cut.
    pub fn is_durable(&self) -> bool {
        self.state.borrow().journal.is_settled()
    }

    /// Does what a change was found to need.
    pub(super) async fn meet(&self, need: Need) -> Result<(), IoError> {
        self.check()?;
        match need {
            Need::Load(missing) => self.load(missing).await,
            Need::Metadata => self.make_space(Use::Metadata).await,
            Need::Commit => self.commit().await,
        }
    }

    /// Gets more free blocks: new regions if the pool has any, else blocks that a commit sets free.
    pub(super) async fn make_space(&self, what: Use) -> Result<(), IoError> {
        let before = self.state.borrow().space.free_blocks(what);
        if self.grow(what, Ask::Needed).await {
            return Ok(());
        }
        if self.state.borrow().space.held_blocks(what) > 0 {
            self.commit().await?;
            self.release();
        }
        loop {
            let (free, waits) = {
                let space = &self.state.borrow().space;
                (space.free_blocks(what), space.waits_for_reads(self.durable_generation.get()))
            };
            match (free > before, waits) {
                (true, _) => return Ok(()),
                (false, true) => {
                    self.pressed.set(self.is_pinned());
                    self.changed.wait().await;
                }
                (false, false) => break,
            }
            self.check()?;
        }
        self.full.set(true);
        Err(IoError::CapacityExceeded)
    }

    /// Asks the pool for regions. False when it has none.
    pub(super) async fn grow(&self, what: Use, ask: Ask) -> bool {
        let had = self.state.borrow().space.regions().count();
        let lock = self.grant_lock.acquire(1).await;
        if self.state.borrow().space.regions().count() > had {
            return true;
        }
        let Some(regions) = self.regions.borrow().clone() else { return false };
        let granted = regions.grant(self.index, what, ask).await;
        drop(lock);
        let mut state = self.state.borrow_mut();
        for (id, kind) in &granted {
            state.space.add(*id, *kind);
        }
        drop(state);
        if !granted.is_empty() {
            self.full.set(false);
            self.changed.notify();
        }
        !granted.is_empty()
    }

    pub(super) async fn give_back(&self, regions: Vec<RegionId>) {
        let link = self.regions.borrow().clone();
        if let Some(link) = link {
            link.give_back(self.index, regions).await;
        }
    }

    /// Tells the shard about a node.
    pub fn set_lineage(&self, node: NodeId, lineage: Lineage) {
        self.state.borrow_mut().nodes.set_lineage(node, lineage);
    }

    /// Forgets a node that is gone from the catalog.
    pub fn forget(&self, node: NodeId) {
        self.state.borrow_mut().nodes.forget(node);
    }

    /// Tells the shard where a volume's writes go.
    pub fn set_volume(&self, volume: VolumeId, head: NodeId, referenced: Arc<AtomicU64>) {
        let state = VolumeState { head, held: false, referenced };
        self.state.borrow_mut().volumes.insert(volume, state);
        self.changed.notify();
    }

    /// Forgets a deleted volume: further I/O is refused.
    pub fn remove_volume(&self, volume: VolumeId) {
        self.state.borrow_mut().volumes.remove(&volume);
        self.changed.notify();
    }

    /// Sees to it that the journal can take the records of a seal; what writes take meanwhile leaves as much.
    pub async fn make_journal_room(&self) -> Result<(), IoError> {
        let room = self.state.borrow().journal.room();
        match room < SEAL_BLOCKS {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    /// First half of the fence: no change of these volumes' maps from now on until [`seal`](Shard::seal).
    pub fn fence(&self, volumes: &[VolumeId]) {
        let mut state = self.state.borrow_mut();
        for volume in volumes.iter().filter(|_| !(is(Sabotage::SealLate) && self.index == 0)) {
            if let Some(volume) = state.volumes.get_mut(volume) {
                volume.held = true;
            }
        }
        if !is(Sabotage::ForgetHold) {
            self.commit_hold.set(self.commit_hold.get() + 1);
        }
    }

    /// Second half of the fence: each head ends and its successor goes on in `epoch`. Commits wait until
    /// [`settle`](Shard::settle).
    pub fn seal(&self, changes: &[(VolumeId, NodeId, NodeId)], parents: &[(NodeId, Lineage)], epoch: Epoch) {
        let mut state = self.state.borrow_mut();
        for (node, lineage) in parents {
            state.nodes.set_lineage(*node, *lineage);
        }
        for (volume, node, successor) in changes {
            let record = super::journal::Record::Seal { node: *node, successor: *successor, epoch };
            state.record(&record);
            self.stage(&state.journal);
            if let Some(volume) = state.volumes.get_mut(volume) {
                volume.head = *successor;
                volume.held = false;
            }
        }
        state.epoch = state.epoch.max(epoch);
        drop(state);
        self.changed.notify();
    }

    /// The catalog knows of the seal: commits may go on.
    pub fn settle(&self) {
        self.commit_hold.set(self.commit_hold.get().saturating_sub(1));
        self.changed.notify();
    }
}

/// Flushes every device that has a write cache, side by side.
pub(super) async fn flush_all(devices: &[Device]) -> Result<(), IoError> {
    let cached = devices.iter().filter(|device| device.info().write_cache);
    super::join::all(cached.map(|device| device.flush())).await.into_iter().collect()
}
