//! The handle through which a volume or a snapshot is read and written.
//!
//! A volume is dealt over the shards in chunks of 1 MiB: chunk `c` is leaf `c / S` of shard `c mod S`. A request
//! that covers several chunks is split, and its parts run side by side.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use uuid::Uuid;

use super::io::Source;
use super::local::Owners;
use super::pointer::{BLOCK_BYTES, CHUNK_BYTES, FANOUT};
use super::sabotage::{Sabotage, is};
use crate::device::IoError;
use crate::memory::{DmaBuf, DmaSlice};
use crate::reactor::gate::Gate;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The unit of addresses: the smallest logical block that a host can be given.
const SECTOR: u64 = 512;

/// An open volume or snapshot. Cheap to clone; usable on every reactor.
#[derive(Clone)]
pub struct Volume {
    pub(super) shared: Arc<Shared>,
}

/// What all handles of one volume or snapshot have in common.
pub(super) struct Shared {
    pub(super) owners: Arc<Owners>,
    pub(super) source: Source,
    pub(super) name: std::sync::RwLock<String>,
    pub(super) uuid: Uuid,
    pub(super) size: AtomicU64,
    pub(super) block_size: u32,
    pub(super) write_cache: bool,
    /// Set when the volume was deleted or its pool exported.
    pub(super) gone: AtomicBool,
    /// Blocks that the tree names, over all shards.
    pub(super) referenced: Arc<AtomicU64>,
    pub(super) gate: Gate,
}

/// The part of a request that lies in one chunk.
struct Part {
    shard: u16,
    /// Slot of the first block within the shard's tree.
    slot: u64,
    /// Offset of the first byte within that block.
    within: usize,
    bytes: usize,
}

impl Volume {
    /// The name when it was opened, or after the last rename.
    pub fn name(&self) -> String {
        self.shared.name.read().map(|name| name.clone()).unwrap_or_default()
    }

    /// The identity that hosts see.
    pub fn uuid(&self) -> Uuid {
        self.shared.uuid
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.shared.size.load(Ordering::Relaxed)
    }

    /// Logical block size it is meant to be exported with: 512 or 4096.
    pub fn block_size(&self) -> u32 {
        self.shared.block_size
    }

    /// Snapshots are.
    pub fn is_read_only(&self) -> bool {
        matches!(self.shared.source, Source::Node(_))
    }

    /// Whether an acknowledged write may be lost before a flush.
    pub fn has_write_cache(&self) -> bool {
        self.shared.write_cache
    }

    /// Bytes that hold data.
    pub fn allocated(&self) -> u64 {
        self.shared.referenced.load(Ordering::Relaxed) * BLOCK
    }

    /// Passed by those who want others to find what they change unchanged while they look at it.
    pub fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), IoError> {
        if self.shared.gone.load(Ordering::Relaxed) {
            return Err(IoError::Gone);
        }
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.size());
        match fits && offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR) {
            true => Ok(()),
            false => Err(IoError::OutOfRange),
        }
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<super::tree::VolumeId, IoError> {
        self.check(offset, len)?;
        match self.shared.source {
            Source::Volume(volume) => Ok(volume),
            Source::Node(_) => Err(IoError::WriteProtected),
        }
    }

    fn part(&self, offset: u64, len: u64) -> Part {
        let shards = self.shared.owners.reactors.len() as u64;
        let (chunk, within) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
        Part {
            shard: (chunk % shards) as u16,
            slot: chunk / shards * FANOUT as u64 + within / BLOCK,
            within: (within % BLOCK) as usize,
            bytes: len.min(CHUNK_BYTES - within) as usize,
        }
    }

    fn parts(&self, offset: u64, len: u64) -> Vec<Part> {
        let (mut at, end) = (offset, offset + len);
        let mut parts = Vec::new();
        while at < end {
            let part = self.part(at, end - at);
            at += part.bytes as u64;
            parts.push(part);
        }
        parts
    }

    /// Fills `buf` from byte `offset`. The buffer comes back in any case, all zeroes after an error.
    pub async fn read(&self, offset: u64, mut buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        if let Err(error) = self.check(offset, buf.len() as u64) {
            buf.fill(0);
            return (Err(error), buf);
        }
        let part = self.part(offset, buf.len() as u64);
        if part.bytes == buf.len() {
            return self.read_part(part, buf).await;
        }
        let (len, mut reads) = (buf.len(), Vec::new());
        for part in self.parts(offset, buf.len() as u64) {
            let piece = buf.split_to(part.bytes);
            reads.push(self.read_part(part, piece));
        }
        let mut whole: Option<DmaBuf> = None;
        for (outcome, piece) in super::join::all(reads.into_iter()).await {
            if outcome.is_err() {
                // The piece may have been lost with its shard: a buffer that never was in pieces goes back.
                return (outcome, DmaBuf::zeroed(len));
            }
            match &mut whole {
                Some(whole) => whole.unsplit(piece),
                None => whole = Some(piece),
            }
        }
        (Ok(()), whole.unwrap_or(buf))
    }

    async fn read_part(&self, part: Part, buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        if part.within == 0 && part.bytes.is_multiple_of(BLOCK_BYTES) {
            return self.read_blocks(part.shard, part.slot, buf).await;
        }
        let mut buf = buf;
        let covering = (part.within + part.bytes).next_multiple_of(BLOCK_BYTES);
        let (result, whole) = self.read_blocks(part.shard, part.slot, DmaBuf::uninit(covering)).await;
        buf.copy_from_slice(&whole[part.within..part.within + part.bytes]);
        (result, buf)
    }

    async fn read_blocks(&self, shard: u16, slot: u64, buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        let source = self.shared.source;
        if let Some(shard) = super::local::shard(self.shared.owners.key, shard) {
            return shard.read(source, slot, buf).await;
        }
        let len = buf.len();
        let answer = self
            .shared
            .owners
            .on(shard, move |shard| async move { shard.read(source, slot, buf).await })
            .await;
        answer.unwrap_or_else(|error| (Err(error), DmaBuf::zeroed(len)))
    }

    /// Writes `data` at byte `offset`. With `fua`, or when the volume has no write cache, it is durable when this
    /// returns; otherwise after the next [`flush`](Volume::flush).
    pub async fn write(&self, offset: u64, data: DmaSlice, fua: bool) -> Result<(), IoError> {
        let volume = self.check_write(offset, data.len() as u64)?;
        let part = self.part(offset, data.len() as u64);
        if part.bytes == data.len() {
            self.write_part(volume, part, data).await?;
        } else {
            let mut rest = data;
            let mut writes = Vec::new();
            for part in self.parts(offset, rest.len() as u64) {
                let piece = rest.split_to(part.bytes);
                writes.push(self.write_part(volume, part, piece));
            }
            for result in super::join::all(writes.into_iter()).await {
                result?;
            }
        }
        self.settle(fua).await
    }

    async fn settle(&self, fua: bool) -> Result<(), IoError> {
        let fua = fua && !is(Sabotage::IgnoreFua);
        match fua || !self.shared.write_cache {
            true => self.shared.owners.flush().await,
            false => Ok(()),
        }
    }

    async fn write_part(
        &self,
        volume: super::tree::VolumeId,
        part: Part,
        data: DmaSlice,
    ) -> Result<(), IoError> {
        if let Some(shard) = super::local::shard(self.shared.owners.key, part.shard) {
            return shard.write_bytes(volume, part.slot, part.within, data).await;
        }
        self.shared
            .owners
            .on(part.shard, move |shard| async move {
                shard.write_bytes(volume, part.slot, part.within, data).await
            })
            .await?
    }

    /// Makes every write that was acknowledged before this call durable.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.check(0, 0)?;
        self.shared.owners.flush().await
    }

    /// Gives back the space of all whole 4 KiB blocks in the range; they read as zeroes. Parts of blocks at the
    /// edges stay as they are.
    pub async fn deallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let volume = self.check_write(offset, len)?;
        let first = offset.next_multiple_of(BLOCK);
        let end = (offset + len) / BLOCK * BLOCK;
        if first < end {
            self.unmap(volume, first, end).await?;
        }
        self.settle(false).await
    }

    /// Makes the range read as zeroes and gives its space back, edges included.
    pub async fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<(), IoError> {
        let volume = self.check_write(offset, len)?;
        let end = offset + len;
        let (inner, inner_end) = (offset.next_multiple_of(BLOCK).min(end), (end / BLOCK * BLOCK).max(offset));
        for (from, to) in [(offset, inner), (inner_end.max(inner), end)] {
            if from < to {
                let zeroes = DmaBuf::zeroed((to - from) as usize).freeze();
                self.write_part(volume, self.part(from, to - from), zeroes).await?;
            }
        }
        if inner < inner_end {
            self.unmap(volume, inner, inner_end).await?;
        }
        self.settle(fua).await
    }

    /// Makes holes of whole blocks, each shard's leaves in one go.
    pub(super) async fn unmap(
        &self,
        volume: super::tree::VolumeId,
        first: u64,
        end: u64,
    ) -> Result<(), IoError> {
        let shards = self.shared.owners.reactors.len() as u64;
        let mut work = Vec::new();
        for shard in 0..shards {
            let (from, to) = (slots_before(first, shard, shards), slots_before(end, shard, shards));
            if from < to {
                let run = move |shard: std::rc::Rc<super::shard::Shard>| async move {
                    shard.unmap(volume, from, to - from).await
                };
                work.push(self.shared.owners.on(shard as u16, run));
            }
        }
        for result in super::join::all(work.into_iter()).await {
            result??;
        }
        Ok(())
    }
}

/// The slots that `shard`, one of `shards`, has of a volume's first `offset` bytes.
pub(super) fn slots_before(offset: u64, shard: u64, shards: u64) -> u64 {
    let (chunk, within) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
    let whole = chunk / shards + u64::from(chunk % shards > shard);
    let partial = if chunk % shards == shard { within / BLOCK } else { 0 };
    whole * FANOUT as u64 + partial
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("name", &self.name()).field("uuid", &self.shared.uuid).finish()
    }
}
