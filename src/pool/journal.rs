//! The journal of one shard: the form of its records and blocks, and the ring's bookkeeping. No I/O.
//!
//! A record says what changed in a volume's map since the last commit. Records are packed into 4 KiB blocks; block
//! `sequence` lies at `sequence mod ring size`, in two copies. Recovery starts at the sequence that the shard's root
//! names and ends at the first block that is not whole in either copy.
//!
//! A record may be in the journal while the data it maps never reached the device (both were written before one
//! flush, and power failed). Each block therefore says up to which sequence a device flush had completed when it was
//! written: records from there on are believed only when the data they map fits its checksum.
//!
//! ```text
//! block header 64 B: magic │ crc32c │ pool │ shard │ records │ sequence │ durable │ bytes
//! map    32 B + 4 B a block: kind 1 │ count u16 │ node u32 │ slot u64 │ block u64 │ birth u64 │ crc32c …
//! unmap  32 B:               kind 2 │ count u16 │ node u32 │ slot u64 │ 0         │ birth u64
//! seal   32 B:               kind 3 │ 0         │ node u32 │ successor u64 │ 0    │ epoch u64
//! ```
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::node::NodeId;
use super::pointer::{BLOCK_BYTES, Block, EPOCH_MAX, Epoch, FANOUT};

const MAGIC: [u8; 4] = *b"RMJR";
const MAP: u8 = 1;
const UNMAP: u8 = 2;
const SEAL: u8 = 3;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    crc: U32,
    pool: [u8; 16],
    shard: U16,
    records: U16,
    bytes: U32,
    sequence: U64,
    durable: U64,
    reserved: [u8; 16],
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 64);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct RawRecord {
    kind: u8,
    reserved: u8,
    count: U16,
    node: U32,
    slot: U64,
    block: U64,
    birth: U64,
}

const RECORD_BYTES: usize = size_of::<RawRecord>();
const _: () = assert!(RECORD_BYTES == 32);

/// One change of a shard's maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// Slots `slot..` of the node now name the adjacent blocks from `block`.
    Map {
        /// The head written to.
        node: NodeId,
        /// First slot (4 KiB block within the shard's part of the volume); all lie in one leaf page.
        slot: u64,
        /// First block.
        block: Block,
        /// Epoch of the write.
        birth: Epoch,
        /// CRC-32C of each block.
        crcs: Vec<u32>,
    },
    /// Slots `slot..slot + count` of the node became holes.
    Unmap {
        /// The head trimmed.
        node: NodeId,
        /// First slot; all lie in one leaf page.
        slot: u64,
        /// Slots.
        count: u16,
        /// Epoch of the trim.
        birth: Epoch,
    },
    /// The head `node` was sealed and `successor` goes on in `epoch`: later records for the successor belong to
    /// `node` when the catalog never heard of the successor.
    Seal {
        /// The head sealed.
        node: NodeId,
        /// The head that goes on.
        successor: NodeId,
        /// The epoch in which it goes on.
        epoch: Epoch,
    },
}

impl RawRecord {
    fn new(kind: u8, count: u16, node: NodeId, slot: u64, block: u64, birth: Epoch) -> RawRecord {
        RawRecord {
            kind,
            reserved: 0,
            count: count.into(),
            node: node.0.into(),
            slot: slot.into(),
            block: block.into(),
            birth: birth.into(),
        }
    }
}

impl Record {
    /// The stored form, but for the checksums of a map.
    fn raw(&self) -> RawRecord {
        match self {
            Record::Map { node, slot, block, birth, crcs } => {
                RawRecord::new(MAP, crcs.len() as u16, *node, *slot, block.raw(), *birth)
            }
            Record::Unmap { node, slot, count, birth } => {
                RawRecord::new(UNMAP, *count, *node, *slot, 0, *birth)
            }
            Record::Seal { node, successor, epoch } => {
                RawRecord::new(SEAL, 0, *node, u64::from(successor.0), 0, *epoch)
            }
        }
    }

    /// Reads one record; `None` when it is not of this format.
    fn decode(bytes: &[u8]) -> Option<(Record, &[u8])> {
        let (raw, mut rest) = RawRecord::read_from_prefix(bytes).ok()?;
        let (count, slot) = (raw.count.get(), raw.slot.get());
        let (node, birth) = (NodeId(raw.node.get()), raw.birth.get());
        let in_one_leaf =
            count > 0 && (slot % FANOUT as u64) + u64::from(count) <= FANOUT as u64 && slot < 1 << 32;
        if birth > EPOCH_MAX {
            return None;
        }
        let record = match raw.kind {
            MAP if in_one_leaf => {
                let (crcs, tail) = rest.split_at_checked(usize::from(count) * 4)?;
                rest = tail;
                let crcs =
                    crcs.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
                Record::Map { node, slot, block: Block::from_raw(raw.block.get())?, birth, crcs }
            }
            UNMAP if in_one_leaf => Record::Unmap { node, slot, count, birth },
            // A successor is always the younger; anything else could lead round in a circle.
            SEAL if slot > u64::from(node.0) => {
                Record::Seal { node, successor: NodeId(u32::try_from(slot).ok()?), epoch: birth }
            }
            _ => return None,
        };
        Some((record, rest))
    }
}

/// A journal block read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalBlock {
    /// Its place in the sequence.
    pub sequence: u64,
    /// Everything before this sequence was flushed when the block was written.
    pub durable: u64,
    /// Its records.
    pub records: Vec<Record>,
}

/// Reads one stored block; `None` when it is not a whole journal block of this shard.
pub fn decode_block(pool: Uuid, shard: u16, bytes: &[u8]) -> Option<JournalBlock> {
    let (header, _) = Header::read_from_prefix(bytes).ok()?;
    let len = header.bytes.get() as usize;
    if header.magic != MAGIC
        || header.pool != *pool.as_bytes()
        || header.shard.get() != shard
        || !(HEADER_BYTES..=BLOCK_BYTES).contains(&len)
        || bytes.len() != BLOCK_BYTES
    {
        return None;
    }
    let zeroed = Header { crc: 0.into(), ..header };
    let crc = crate::crc32c::append(crate::crc32c::crc32c(zeroed.as_bytes()), &bytes[HEADER_BYTES..]);
    if crc != header.crc.get() {
        return None;
    }
    let mut rest = &bytes[HEADER_BYTES..len];
    let mut records = Vec::new();
    for _ in 0..header.records.get() {
        let (record, tail) = Record::decode(rest)?;
        records.push(record);
        rest = tail;
    }
    Some(JournalBlock { sequence: header.sequence.get(), durable: header.durable.get(), records })
}

fn encode_block(pool: Uuid, shard: u16, sequence: u64, durable: u64, payload: &Payload, out: &mut [u8]) {
    let mut header = Header {
        magic: MAGIC,
        crc: 0.into(),
        pool: *pool.as_bytes(),
        shard: shard.into(),
        records: payload.records.into(),
        bytes: ((HEADER_BYTES + payload.bytes.len()) as u32).into(),
        sequence: sequence.into(),
        durable: durable.into(),
        reserved: [0; 16],
    };
    out.fill(0);
    out[HEADER_BYTES..HEADER_BYTES + payload.bytes.len()].copy_from_slice(&payload.bytes);
    out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    header.crc = crate::crc32c::crc32c(out).into();
    out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
}

#[derive(Default)]
struct Payload {
    records: u16,
    bytes: Vec<u8>,
}

/// The bookkeeping of a journal ring.
pub struct Journal {
    pool: Uuid,
    shard: u16,
    /// Blocks in the ring.
    size: u64,
    /// Sequence of the next block to be written.
    next: u64,
    /// First sequence that recovery would still need.
    tail: u64,
    /// Everything before this sequence was flushed.
    flushed: u64,
    full: VecDeque<Payload>,
    open: Payload,
    /// The last batch on the device: the sequence after it, and the records up to its end.
    written: (u64, u64),
    /// Records appended since the shard was opened.
    appended: u64,
    /// Of these, the first so many end with the last that is not a seal.
    changed: u64,
    /// Of these, the first so many are durable.
    durable: u64,
}

/// Blocks that must be written side by side, from sequence `first` on.
pub struct Batch {
    /// Sequence of the first block.
    pub first: u64,
    /// The blocks' bytes, one after another.
    pub bytes: Vec<u8>,
    /// Records that are durable once the batch is written and flushed.
    pub covers: u64,
}

impl Journal {
    /// A ring of `size` blocks whose next block is `next`.
    pub fn new(pool: Uuid, shard: u16, size: u64, next: u64) -> Journal {
        Journal {
            pool,
            shard,
            size,
            next,
            tail: next,
            flushed: next,
            full: VecDeque::new(),
            open: Payload::default(),
            written: (next, 0),
            appended: 0,
            changed: 0,
            durable: 0,
        }
    }

    /// Appends a record. The caller has checked [`room`](Journal::room).
    pub fn append(&mut self, record: &Record) {
        match record {
            Record::Map { crcs, .. } => self.push(record.raw(), crcs),
            _ => self.push(record.raw(), &[]),
        }
    }

    /// Appends a [`Record::Map`] whose checksums are the caller's.
    pub fn append_map(&mut self, node: NodeId, slot: u64, block: Block, birth: Epoch, crcs: &[u32]) {
        self.push(RawRecord::new(MAP, crcs.len() as u16, node, slot, block.raw(), birth), crcs);
    }

    fn push(&mut self, raw: RawRecord, crcs: &[u32]) {
        if HEADER_BYTES + self.open.bytes.len() + RECORD_BYTES + 4 * crcs.len() > BLOCK_BYTES {
            self.full.push_back(std::mem::take(&mut self.open));
        }
        let out = &mut self.open.bytes;
        out.reserve_exact(if out.is_empty() { BLOCK_BYTES - HEADER_BYTES } else { 0 });
        out.extend_from_slice(raw.as_bytes());
        for crc in crcs {
            out.extend_from_slice(&crc.to_le_bytes());
        }
        self.open.records += 1;
        self.appended += 1;
        if raw.kind != SEAL {
            self.changed = self.appended;
        }
    }

    /// The block that the last record went into, as it is now. Returns its sequence, which it keeps when
    /// [`take_batch`](Journal::take_batch) hands it out.
    pub fn encode_open(&self, out: &mut [u8]) -> u64 {
        let sequence = self.next + self.full.len() as u64;
        encode_block(self.pool, self.shard, sequence, self.flushed, &self.open, out);
        sequence
    }

    /// Blocks that can still be appended before a commit must free the ring.
    pub fn room(&self) -> u64 {
        (self.size + self.tail).saturating_sub(self.next + self.full.len() as u64 + 1)
    }

    /// The next block gets `sequence`, or a later one.
    pub fn skip_to(&mut self, sequence: u64) {
        self.next = self.next.max(sequence);
        self.written.0 = self.written.0.max(sequence);
    }

    /// Whether recovery would find nothing to do.
    pub fn is_empty(&self) -> bool {
        self.next == self.tail && !self.is_pending()
    }

    /// The sequences that recovery would read.
    #[cfg(test)]
    pub fn live(&self) -> std::ops::Range<u64> {
        self.tail..self.next
    }

    /// The sequences that recovery would need, and that are written.
    pub fn written(&self) -> std::ops::Range<u64> {
        self.tail..self.written.0.max(self.tail)
    }

    /// Blocks of the ring.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn is_pending(&self) -> bool {
        self.open.records > 0 || !self.full.is_empty()
    }

    /// Records appended so far.
    pub fn appended(&self) -> u64 {
        self.appended
    }

    /// Whether every change of a map is durable; seals may still wait.
    pub fn is_settled(&self) -> bool {
        self.durable >= self.changed
    }

    /// Records known to be durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Hands out all pending records as blocks to write.
    pub fn take_batch(&mut self) -> Option<Batch> {
        if self.open.records > 0 {
            self.full.push_back(std::mem::take(&mut self.open));
        }
        let first = self.next;
        let payloads = std::mem::take(&mut self.full);
        let mut bytes = vec![0; payloads.len() * BLOCK_BYTES];
        for (payload, out) in payloads.iter().zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            encode_block(self.pool, self.shard, self.next, self.flushed, payload, out);
            self.next += 1;
        }
        (!bytes.is_empty()).then_some(Batch { first, bytes, covers: self.appended })
    }

    /// A batch is on the device, though not flushed.
    pub fn batch_written(&mut self, batch: &Batch) {
        let next = batch.first + (batch.bytes.len() / BLOCK_BYTES) as u64;
        self.written = (self.written.0.max(next), self.written.1.max(batch.covers));
    }

    /// What [`mark_durable`](Journal::mark_durable) takes once a device flush that starts now has completed.
    pub fn mark(&self) -> (u64, u64) {
        self.written
    }

    /// A device flush that began when [`mark`](Journal::mark) gave these numbers has completed.
    pub fn mark_durable(&mut self, (sequence, records): (u64, u64)) {
        self.flushed = self.flushed.max(sequence);
        self.durable = self.durable.max(records);
    }

    /// A commit takes over everything appended so far. Returns the sequence that its root names as the journal's
    /// start, and the records it makes durable. Pending blocks keep their sequences though they are never written:
    /// should the commit not be completed, the stage still has them, and no later block may take their place there.
    pub fn begin_commit(&mut self) -> (u64, u64) {
        self.next += self.full.len() as u64 + u64::from(self.open.records > 0);
        self.full.clear();
        self.open = Payload::default();
        (self.next, self.appended)
    }

    /// The commit that [`begin_commit`](Journal::begin_commit) gave these numbers for is durable.
    pub fn end_commit(&mut self, (sequence, records): (u64, u64)) {
        self.tail = self.tail.max(sequence);
        self.mark_durable((sequence, records));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        vec![
            Record::Map {
                node: NodeId(7),
                slot: 300,
                block: Block::new(2, 99),
                birth: 5,
                crcs: (0..200).collect(),
            },
            Record::Unmap { node: NodeId(7), slot: 256, count: 256, birth: 5 },
            Record::Seal { node: NodeId(7), successor: NodeId(9), epoch: 6 },
        ]
    }

    #[test]
    fn blocks_round_trip_and_no_flipped_bit_passes() {
        let pool = Uuid::from_u128(5);
        let mut journal = Journal::new(pool, 3, 16, 40);
        for record in records() {
            journal.append(&record);
        }
        assert_eq!(journal.room(), 15);
        let batch = journal.take_batch().unwrap();
        assert_eq!((batch.first, batch.bytes.len(), batch.covers), (40, 4096, 3));
        let block = decode_block(pool, 3, &batch.bytes).unwrap();
        assert_eq!(block, JournalBlock { sequence: 40, durable: 40, records: records() });
        for bit in 0..batch.bytes.len() * 8 {
            let mut bad = batch.bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_block(pool, 3, &bad), None);
        }
        assert_eq!(decode_block(pool, 4, &batch.bytes), None);
        assert_eq!(decode_block(Uuid::from_u128(6), 3, &batch.bytes), None);
    }

    #[test]
    fn ring_room_returns_with_commits_only() {
        let mut journal = Journal::new(Uuid::nil(), 0, 8, 0);
        let big =
            Record::Map { node: NodeId(1), slot: 0, block: Block::new(0, 9), birth: 1, crcs: vec![0; 256] };
        for _ in 0..3 {
            for _ in 0..3 {
                journal.append(&big);
            }
            let batch = journal.take_batch().unwrap();
            journal.batch_written(&batch);
            journal.mark_durable(journal.mark());
        }
        assert_eq!(journal.room(), 8 - 3 - 1);
        assert_eq!(journal.durable(), 9);
        journal.append(&big);
        let begun = journal.begin_commit();
        assert_eq!(begun, (4, 10));
        assert!(!journal.is_pending());
        journal.end_commit(begun);
        assert_eq!((journal.room(), journal.durable()), (7, 10));
    }
}
