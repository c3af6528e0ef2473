//! The send stream: a snapshot, or its difference from another, as a file or in a pipe.
//!
//! ```text
//! header │ record │ record │ … │ end record
//! ```
//!
//! A record is a range with its data, or a range that became zero; ranges ascend and do not overlap. Every part has a
//! CRC-32C over all of its bytes. A record also names the stream it belongs to and its place in it, and the end record
//! holds what the records add up to and a BLAKE3 digest over every byte before it: a stream that was cut, flipped,
//! reordered or put together from several is refused, with the place and the reason. All integers are little-endian.
//! docs/send-stream.md has the layout byte by byte.
//!
//! [`Encoder`] and [`Decoder`] are machines: they see bytes, not files. Whatever comes in, the decoder holds one record at
//! most.
#![forbid(unsafe_code)]

mod decode;
mod encode;
#[cfg(test)]
mod tests;

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use decode::{Decoder, Event};
pub use encode::Encoder;

/// The first bytes of every stream.
pub const MAGIC: [u8; 8] = *b"RIMSEND\0";
/// The version written, and the only one read.
pub const VERSION: u32 = 1;
/// The most data of one record, bytes.
pub const DATA_MAX: usize = 1 << 20;
/// What offsets, lengths and sizes are multiples of, bytes.
pub const UNIT: u64 = 4096;
/// Bytes of a record before its data.
pub const RECORD_BYTES: usize = size_of::<RawRecord>();

/// The longest name of a pool or snapshot, bytes.
const NAME_MAX: usize = 223;
const HEADER_BYTES: usize = size_of::<RawHeader>();
const END_BYTES: usize = size_of::<RawEnd>();
const CRC_BYTES: usize = 4;

/// What is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The identity of this stream; no two have the same.
    pub stream: Uuid,
    /// The identity of the snapshot.
    pub uuid: Uuid,
    /// The identity of the snapshot that it is the difference from; `None` when all data is here.
    pub base: Option<Uuid>,
    /// The pool it comes from.
    pub pool: Uuid,
    /// The snapshot's name.
    pub name: String,
    /// That pool's name.
    pub pool_name: String,
    /// Bytes of the snapshot.
    pub size: u64,
    /// Logical block size for hosts: 512 or 4096.
    pub block_size: u32,
    /// When it was taken, seconds since 1970.
    pub created: u64,
    /// The epoch of its pool that ended with it.
    pub epoch: u64,
    /// Bytes of data that follow.
    pub data_bytes: u64,
    /// Bytes that became zero.
    pub zero_bytes: u64,
}

/// What the records of a stream add up to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records with data.
    pub data_records: u64,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Records of what became zero.
    pub zero_records: u64,
    /// Bytes that became zero.
    pub zero_bytes: u64,
}

/// Why a stream is refused, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at byte {at} of the stream: {fault}")]
pub struct StreamError {
    /// Where the faulty part begins; for what is missing, where it should be.
    pub at: u64,
    /// The reason.
    pub fault: Fault,
}

/// What is wrong with a stream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Something else begins here.
    #[error("this is no send stream of Rimrock")]
    NotAStream,
    /// Of another version of the format.
    #[error("it is in version {0} of the format; this Rimrock reads version {VERSION}")]
    Version(u32),
    /// Bytes are not what was written.
    #[error("the checksum of the {0} does not fit: the stream is damaged")]
    Checksum(&'static str),
    /// A number is not what it may be.
    #[error("{0}")]
    Field(&'static str),
    /// A record of another stream.
    #[error("the record belongs to another stream")]
    OtherStream,
    /// A record is missing, or comes twice.
    #[error("record {found} stands where record {expected} belongs")]
    Sequence {
        /// The number due.
        expected: u64,
        /// The number found.
        found: u64,
    },
    /// The stream ends too early.
    #[error("the stream ends within the {0}: it was cut short")]
    CutShort(&'static str),
    /// Something follows the end.
    #[error("something follows the end of the stream")]
    Trailing,
    /// The end record disagrees with the records or the header.
    #[error("the stream does not hold what its {0} says it does")]
    Sums(&'static str),
    /// The digest disagrees with the bytes.
    #[error("the digest does not fit the bytes before it: the stream is damaged or was put together")]
    Digest,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U32,
    length: U32,
    stream: [u8; 16],
    uuid: [u8; 16],
    base: [u8; 16],
    pool: [u8; 16],
    size: U64,
    created: U64,
    epoch: U64,
    data_bytes: U64,
    zero_bytes: U64,
    block_size: U32,
    name_len: U16,
    pool_name_len: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRecord {
    kind: [u8; 4],
    crc: U32,
    stream: U64,
    sequence: U64,
    offset: U64,
    length: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEnd {
    data_records: U64,
    data_bytes: U64,
    zero_records: U64,
    zero_bytes: U64,
    digest: [u8; 32],
}

const _: () = assert!(HEADER_BYTES == 128 && RECORD_BYTES == 40 && END_BYTES == 64);

const DATA: [u8; 4] = *b"DATA";
const ZERO: [u8; 4] = *b"ZERO";
const END: [u8; 4] = *b"END ";

impl RawRecord {
    /// CRC-32C of a record, its own field as zero.
    fn checksum(&self, data: &[u8]) -> u32 {
        let bytes = self.as_bytes();
        let crc = crate::crc32c::crc32c(&bytes[..4]);
        let crc = crate::crc32c::append(crc, &[0; 4]);
        crate::crc32c::append(crate::crc32c::append(crc, &bytes[8..]), data)
    }
}

/// The part of a stream's identity that its records carry.
fn tag(stream: Uuid) -> u64 {
    stream.as_u64_pair().0 ^ stream.as_u64_pair().1
}

/// The rest of a header after its fixed part: names, zeroes up to a multiple of 8, checksum.
fn rest_of_header(names: usize) -> usize {
    (names + CRC_BYTES).next_multiple_of(8)
}

/// Follows the ranges: each begins where the one before ended, or later, and ends within the snapshot.
#[derive(Debug)]
struct Ranges {
    size: u64,
    end: u64,
    totals: Totals,
}

impl Ranges {
    fn new(size: u64) -> Ranges {
        Ranges { size, end: 0, totals: Totals::default() }
    }

    fn admit(&mut self, offset: u64, length: u64, is_data: bool) -> Result<(), Fault> {
        if length == 0 || !offset.is_multiple_of(UNIT) || !length.is_multiple_of(UNIT) {
            return Err(Fault::Field("a range does not consist of whole blocks of 4096 bytes"));
        }
        if is_data && length > DATA_MAX as u64 {
            return Err(Fault::Field("a record has more than 1 MiB of data"));
        }
        let end = offset.checked_add(length).filter(|end| *end <= self.size);
        let end = end.ok_or(Fault::Field("a range goes beyond the end of the snapshot"))?;
        if offset < self.end {
            return Err(Fault::Field("a range begins before the one before it has ended"));
        }
        self.end = end;
        let totals = &mut self.totals;
        let (records, bytes) = match is_data {
            true => (&mut totals.data_records, &mut totals.data_bytes),
            false => (&mut totals.zero_records, &mut totals.zero_bytes),
        };
        *records += 1;
        *bytes += length;
        Ok(())
    }
}

impl Header {
    /// Whether the numbers are such as a snapshot can have.
    fn check(&self) -> Result<(), Fault> {
        let is_name = |name: &str| {
            let letters = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:@+-".contains(&byte));
            letters
                && name.len() <= NAME_MAX
                && name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        };
        let fault = if !is_name(&self.name) || !is_name(&self.pool_name) {
            "a name is none that a snapshot or pool can have"
        } else if self.uuid.is_nil() || self.stream.is_nil() {
            "an identity is missing"
        } else if self.base == Some(self.uuid) {
            "the snapshot is its own base"
        } else if ![512, 4096].contains(&self.block_size) {
            "the block size is neither 512 nor 4096"
        } else if self.size == 0 || !self.size.is_multiple_of(UNIT) || self.size > i64::MAX as u64 {
            "the size is none that a snapshot can have"
        } else if self.data_bytes.checked_add(self.zero_bytes).is_none_or(|sum| sum > self.size) {
            "more is announced than the snapshot has bytes"
        } else {
            return Ok(());
        };
        Err(Fault::Field(fault))
    }
}
