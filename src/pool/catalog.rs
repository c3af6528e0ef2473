//! The catalog: everything of a pool that is not data, as one checksummed log of transactions.
//!
//! A catalog is a map from text keys to byte values. A change is a *transaction*: any number of puts and deletes
//! that become true together. Transactions are appended to one of two halves; when a half is full, the whole map
//! is written as the first transaction of the other half under a higher generation, and the log goes on there.
//! Every block is written to two copies (two devices when the pool has two).
//!
//! A transaction starts at a block boundary:
//!
//! ```text
//! header 64 B: magic │ crc32c │ generation │ sequence │ bytes │ entries │ pool │ kind
//! entry:       key length u16 │ value length u32 (u32::MAX = delete) │ key │ value
//! ```
//!
//! After a crash the newest half whose first transaction is whole is read up to its first transaction that is not
//! whole in either copy. A transaction is durable once [`Catalog::commit`] returns; it is the commit point of
//! every operation on more than one shard.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::label::Geometry;
use super::pointer::BLOCK_BYTES;
use crate::device::{Device, IoError};
use crate::memory::DmaBuf;

const MAGIC: [u8; 4] = *b"RMCT";
const DELETE: u32 = u32::MAX;
const KIND_SNAPSHOT: u16 = 1;
const KIND_CHANGE: u16 = 2;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    crc: U32,
    generation: U64,
    sequence: U64,
    bytes: U32,
    entries: U32,
    pool: [u8; 16],
    kind: U16,
    reserved: [u8; 14],
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 64);

/// Key length and value length.
const ENTRY_BYTES: usize = 6;

/// The map that the log adds up to.
pub type Map = BTreeMap<String, Vec<u8>>;

/// A set of changes that become true together.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    changes: Vec<(String, Option<Vec<u8>>)>,
}

/// Why a catalog could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CatalogError {
    /// No half holds a whole first transaction.
    #[error("no readable catalog on the pool's devices")]
    Missing,
    /// A later transaction is there while one in the middle is damaged in every copy.
    #[error("the catalog is damaged in every copy at block {block} (transaction {sequence})")]
    Damaged {
        /// Block on the device of copy 0.
        block: u64,
        /// The transaction that should be there.
        sequence: u64,
    },
    /// The whole map no longer fits in a half.
    #[error(
        "the pool's catalog is full: {bytes} bytes do not fit in {room}; delete snapshots or volumes that are not needed"
    )]
    Full {
        /// Bytes needed.
        bytes: usize,
        /// Bytes that a half holds.
        room: usize,
    },
    /// The device failed.
    #[error("catalog I/O: {0}")]
    Io(#[from] IoError),
}

impl Transaction {
    /// An empty transaction.
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Sets `key` to `value`.
    pub fn put(&mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> &mut Transaction {
        self.changes.push((key.into(), Some(value.into())));
        self
    }

    /// Sets `key`, or removes it.
    pub fn set(&mut self, key: impl Into<String>, value: Option<Vec<u8>>) -> &mut Transaction {
        self.changes.push((key.into(), value));
        self
    }

    fn encode(&self, pool: Uuid, generation: u64, sequence: u64, kind: u16) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        for (key, value) in &self.changes {
            out.extend_from_slice(&(key.len() as u16).to_le_bytes());
            let len = value.as_ref().map_or(DELETE, |v| v.len() as u32);
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(key.as_bytes());
            out.extend_from_slice(value.as_deref().unwrap_or_default());
        }
        let mut header = Header {
            magic: MAGIC,
            crc: 0.into(),
            generation: generation.into(),
            sequence: sequence.into(),
            bytes: (out.len() as u32).into(),
            entries: (self.changes.len() as u32).into(),
            pool: *pool.as_bytes(),
            kind: kind.into(),
            reserved: [0; 14],
        };
        out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        header.crc = crate::crc32c::crc32c(&out).into();
        out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        out
    }

    /// Reads the transaction at the start of `area`; `None` when there is no whole one of this pool.
    fn decode(pool: Uuid, area: &[u8]) -> Option<(Header, Transaction)> {
        let (header, _) = Header::read_from_prefix(area).ok()?;
        let bytes = header.bytes.get() as usize;
        if header.magic != MAGIC
            || header.pool != *pool.as_bytes()
            || bytes < HEADER_BYTES
            || bytes > area.len()
        {
            return None;
        }
        let zeroed = Header { crc: 0.into(), ..header };
        let crc = crate::crc32c::append(crate::crc32c::crc32c(zeroed.as_bytes()), &area[HEADER_BYTES..bytes]);
        if crc != header.crc.get() {
            return None;
        }
        let mut rest = &area[HEADER_BYTES..bytes];
        let mut changes = Vec::new();
        for _ in 0..header.entries.get() {
            let (head, tail) = rest.split_at_checked(6)?;
            let key_len = usize::from(u16::from_le_bytes([head[0], head[1]]));
            let len = u32::from_le_bytes([head[2], head[3], head[4], head[5]]);
            let (key, tail) = tail.split_at_checked(key_len)?;
            let key = std::str::from_utf8(key).ok()?.to_owned();
            let value_len = if len == DELETE { 0 } else { len as usize };
            let (value, tail) = tail.split_at_checked(value_len)?;
            changes.push((key, (len != DELETE).then(|| value.to_vec())));
            rest = tail;
        }
        Some((header, Transaction { changes }))
    }
}

/// An open catalog. Owned by the pool's home reactor; changes are made one at a time.
pub struct Catalog {
    pool: Uuid,
    copies: Vec<Device>,
    geometry: Geometry,
    map: Map,
    /// Bytes of the whole map as the first transaction of a half.
    bytes: usize,
    generation: u64,
    sequence: u64,
    half: u64,
    /// Next free block within the half.
    position: u64,
    failed: bool,
    bad: Vec<BadCopy>,
}

/// A transaction that one copy does not have as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadCopy {
    /// Copy 0 or 1.
    pub copy: usize,
    /// The transaction.
    pub sequence: u64,
    /// Nothing comes after it, so that it may have been on its way when a crash came.
    pub newest: bool,
    /// The device.
    pub uri: String,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Catalog {
    /// Writes the first catalog of a new pool. `devices` in vdev order.
    pub async fn create(
        pool: Uuid,
        devices: &[Device],
        geometry: Geometry,
        map: Map,
    ) -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog::at(pool, devices, geometry);
        let first = map.into_iter().map(|(key, value)| (key, Some(value)));
        catalog.apply(Transaction { changes: first.collect() });
        // The half that is not used must not hold a catalog of a pool that had the same identity.
        let blank = DmaBuf::zeroed(BLOCK_BYTES);
        catalog.write(1, 0, &blank).await?;
        catalog.switch_half(0).await?;
        Ok(catalog)
    }

    fn at(pool: Uuid, devices: &[Device], geometry: Geometry) -> Catalog {
        let copies = (0..2).map(|copy| devices[copy % devices.len()].clone()).collect();
        Catalog {
            pool,
            copies,
            geometry,
            map: Map::new(),
            bytes: HEADER_BYTES,
            generation: 0,
            sequence: 0,
            half: 1,
            position: 0,
            failed: false,
            bad: Vec::new(),
        }
    }

    /// Reads the catalog of a pool, and writes it again in both copies where one of them is damaged. Also gives texts
    /// that name each damaged place, and the one that a crash may have left half written.
    pub async fn open(
        pool: Uuid,
        devices: &[Device],
        geometry: Geometry,
    ) -> Result<(Catalog, Vec<String>, Option<String>), CatalogError> {
        let mut catalog = Catalog::read(pool, devices, geometry).await?;
        let tell = |bad: &BadCopy, how: &str| {
            format!(
                "catalog transaction {} at byte {} of {} is {how}; its other copy was used",
                bad.sequence, bad.offset, bad.uri
            )
        };
        let (newest, older): (Vec<&BadCopy>, _) = catalog.bad.iter().partition(|bad| bad.newest);
        let damage = older.into_iter().map(|bad| tell(bad, "damaged or missing")).collect();
        let unfinished = newest.first().map(|bad| tell(bad, "not whole, as after a crash"));
        catalog.heal().await?;
        Ok((catalog, damage, unfinished))
    }

    /// Reads the catalog of a pool and leaves the devices as they are.
    pub async fn read(pool: Uuid, devices: &[Device], geometry: Geometry) -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog::at(pool, devices, geometry);
        let mut best: Option<(u64, u64)> = None;
        for half in 0..2 {
            for copy in 0..2 {
                let head = catalog.read_blocks(copy, half, 0, 1).await;
                if let Some((header, _)) = Header::read_from_prefix(&head).ok()
                    && header.magic == MAGIC
                    && header.pool == *pool.as_bytes()
                    && best.is_none_or(|(generation, _)| header.generation.get() > generation)
                    && catalog.first_is_whole(half, header.generation.get()).await
                {
                    best = Some((header.generation.get(), half));
                }
            }
        }
        let (generation, half) = best.ok_or(CatalogError::Missing)?;
        catalog.generation = generation;
        catalog.half = half;
        catalog.replay().await?;
        Ok(catalog)
    }

    /// Makes both copies whole again if one of them was not: a fresh half holds two good copies.
    pub async fn heal(&mut self) -> Result<bool, CatalogError> {
        if self.bad.is_empty() {
            return Ok(false);
        }
        self.switch_half(1 - self.half).await?;
        self.bad.clear();
        Ok(true)
    }

    /// Writes everything again, whatever is on the devices.
    pub async fn write_anew(&mut self) -> Result<(), CatalogError> {
        self.switch_half(1 - self.half).await?;
        self.bad.clear();
        Ok(())
    }

    /// What reading found damaged.
    pub fn bad_copies(&self) -> &[BadCopy] {
        &self.bad
    }

    /// Takes over what another look at the devices found, if nothing was changed in between.
    pub fn note_damage(&mut self, seen: &Catalog) {
        if (seen.generation, seen.sequence) == (self.generation, self.sequence) {
            self.bad.clone_from(&seen.bad);
        }
    }

    async fn first_is_whole(&self, half: u64, generation: u64) -> bool {
        for copy in 0..2 {
            let area = self.read_blocks(copy, half, 0, u64::from(self.geometry.catalog_blocks)).await;
            if let Some((header, _)) = Transaction::decode(self.pool, &area)
                && header.kind.get() == KIND_SNAPSHOT
                && header.generation.get() == generation
            {
                return true;
            }
        }
        false
    }

    async fn replay(&mut self) -> Result<(), CatalogError> {
        let blocks = u64::from(self.geometry.catalog_blocks);
        let areas = [
            self.read_blocks(0, self.half, 0, blocks).await,
            self.read_blocks(1, self.half, 0, blocks).await,
        ];
        let mut expected: Option<u64> = None;
        while self.position < blocks {
            let at = self.position as usize * BLOCK_BYTES;
            let wanted = |found: &Option<(Header, Transaction)>| {
                found.as_ref().is_some_and(|(header, _)| {
                    header.generation.get() == self.generation
                        && expected.is_none_or(|sequence| header.sequence.get() == sequence)
                })
            };
            let mut found: Vec<_> =
                areas.iter().map(|area| Transaction::decode(self.pool, &area[at..])).collect();
            let good: Vec<bool> = found.iter().map(wanted).collect();
            let Some(copy) = good.iter().position(|ok| *ok) else { break };
            let Some((header, transaction)) = found.swap_remove(copy) else { break };
            let used = u64::from(header.bytes.get()).div_ceil(BLOCK_BYTES as u64) as usize * BLOCK_BYTES;
            let differ = areas[0][at..at + used] != areas[1][at..at + used];
            if let Some(copy) = good.iter().position(|ok| !ok).or(differ.then_some(1)) {
                self.bad.push(BadCopy {
                    copy,
                    sequence: header.sequence.get(),
                    newest: false,
                    uri: self.copies[copy].info().uri.clone(),
                    offset: (self.geometry.catalog(copy as u64, self.half) + self.position)
                        * BLOCK_BYTES as u64,
                    length: used as u64,
                });
            }
            self.apply(transaction);
            self.sequence = header.sequence.get();
            expected = Some(self.sequence + 1);
            self.position += u64::from(header.bytes.get()).div_ceil(BLOCK_BYTES as u64);
        }
        self.refuse_gap(&areas)?;
        if let Some(last) = self.bad.last_mut() {
            last.newest = last.sequence == self.sequence;
        }
        Ok(())
    }

    /// A whole later transaction after the end of the log means that the one at the end was lost to damage.
    fn refuse_gap(&self, areas: &[DmaBuf; 2]) -> Result<(), CatalogError> {
        for block in self.position..u64::from(self.geometry.catalog_blocks) {
            for area in areas {
                let later = Transaction::decode(self.pool, &area[block as usize * BLOCK_BYTES..]);
                if later.is_some_and(|(header, _)| {
                    header.generation.get() == self.generation && header.sequence.get() > self.sequence + 1
                }) {
                    return Err(CatalogError::Damaged {
                        block: self.geometry.catalog(0, self.half) + self.position,
                        sequence: self.sequence + 1,
                    });
                }
            }
        }
        Ok(())
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.map.get(key).map(Vec::as_slice)
    }

    /// All entries whose key starts with `prefix`, in key order.
    pub fn scan<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.map
            .range(prefix.to_owned()..)
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (key.as_str(), value.as_slice()))
    }

    /// Bytes of a half.
    fn room(&self) -> usize {
        self.geometry.catalog_blocks as usize * BLOCK_BYTES
    }

    /// Bytes of the whole map after `transaction`, which names no key twice.
    fn bytes_after(&self, transaction: &Transaction) -> usize {
        transaction.changes.iter().fold(self.bytes, |bytes, (key, value)| {
            let old = self.map.get(key).map_or(0, |value| entry_bytes(key, value));
            bytes.saturating_sub(old) + value.as_ref().map_or(0, |value| entry_bytes(key, value))
        })
    }

    /// Whether there is room for something new. Some is kept for what must always be possible: to delete, to open the
    /// pool, to deal out regions.
    pub fn admit(&self, transaction: &Transaction) -> Result<(), CatalogError> {
        let (bytes, room) = (self.bytes_after(transaction), self.room() / 8 * 5);
        if bytes <= room { Ok(()) } else { Err(CatalogError::Full { bytes, room }) }
    }

    /// Makes `transaction` true and durable. After an I/O error the catalog takes no more changes until it is opened
    /// again: what is on the devices is then either the state before or the state after.
    pub async fn commit(&mut self, transaction: Transaction) -> Result<(), CatalogError> {
        if self.failed {
            return Err(CatalogError::Io(IoError::Gone));
        }
        // A quarter is kept free so that a switch of halves always makes room for more changes.
        let (bytes, room) = (self.bytes_after(&transaction), self.room() / 4 * 3);
        if bytes > room && bytes > self.bytes {
            return Err(CatalogError::Full { bytes, room });
        }
        self.failed = true;
        self.append(transaction).await?;
        self.failed = false;
        Ok(())
    }

    async fn append(&mut self, transaction: Transaction) -> Result<(), CatalogError> {
        let bytes = transaction.encode(self.pool, self.generation, self.sequence + 1, KIND_CHANGE);
        let blocks = (bytes.len() / BLOCK_BYTES) as u64;
        if self.position + blocks > u64::from(self.geometry.catalog_blocks) {
            self.apply(transaction);
            return self.switch_half(1 - self.half).await;
        }
        let mut buf = DmaBuf::uninit(bytes.len());
        buf.copy_from_slice(&bytes);
        self.write(self.half, self.position, &buf).await?;
        self.position += blocks;
        self.sequence += 1;
        self.apply(transaction);
        Ok(())
    }

    fn apply(&mut self, transaction: Transaction) {
        for (key, value) in transaction.changes {
            self.bytes += value.as_ref().map_or(0, |value| entry_bytes(&key, value));
            let old = match value {
                Some(value) => self.map.insert(key.clone(), value),
                None => self.map.remove(&key),
            };
            self.bytes -= old.map_or(0, |old| entry_bytes(&key, &old));
        }
    }

    /// Writes the whole map as the first transaction of `half`.
    async fn switch_half(&mut self, half: u64) -> Result<(), CatalogError> {
        let whole = Transaction {
            changes: self.map.iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect(),
        };
        let bytes = whole.encode(self.pool, self.generation + 1, self.sequence + 1, KIND_SNAPSHOT);
        if bytes.len() > self.room() {
            return Err(CatalogError::Full { bytes: bytes.len(), room: self.room() });
        }
        let mut buf = DmaBuf::uninit(bytes.len());
        buf.copy_from_slice(&bytes);
        self.write(half, 0, &buf).await?;
        self.generation += 1;
        self.sequence += 1;
        self.half = half;
        self.position = (bytes.len() / BLOCK_BYTES) as u64;
        Ok(())
    }

    async fn write(&self, half: u64, position: u64, bytes: &DmaBuf) -> Result<(), CatalogError> {
        let data = DmaBuf::copy_of(bytes).freeze();
        let writes = self.copies.iter().enumerate().map(|(copy, device)| {
            let block = self.geometry.catalog(copy as u64, half) + position;
            device.write(block * BLOCK_BYTES as u64, data.clone())
        });
        for written in super::join::all(writes).await {
            written?;
        }
        self.copies[0].flush().await?;
        if self.copies[1].info().uuid != self.copies[0].info().uuid {
            self.copies[1].flush().await?;
        }
        Ok(())
    }

    async fn read_blocks(&self, copy: usize, half: u64, position: u64, blocks: u64) -> DmaBuf {
        let block = self.geometry.catalog(copy as u64, half) + position;
        super::copy::read(&self.copies[copy], block * BLOCK_BYTES as u64, blocks as usize * BLOCK_BYTES).await
    }

    /// The blocks in use on the device of copy `.0`.
    #[cfg(test)]
    pub fn live(&self) -> Vec<(usize, u64)> {
        let blocks = |copy: usize| {
            (0..self.position).map(move |at| (copy, self.geometry.catalog(copy as u64, self.half) + at))
        };
        blocks(0).chain(blocks(1)).collect()
    }
}

/// Reads a transaction and counts its changes.
#[cfg(test)]
pub fn decode_for_test(pool: Uuid, bytes: &[u8]) -> usize {
    Transaction::decode(pool, bytes).map_or(0, |(_, transaction)| transaction.changes.len())
}

fn entry_bytes(key: &str, value: &[u8]) -> usize {
    ENTRY_BYTES + key.len() + value.len()
}
