//! Reading a stream. Whatever the bytes are, the decoder holds one record at most, and says nothing that was not checked.
#![forbid(unsafe_code)]

use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

use super::{
    DATA, DATA_MAX, END, END_BYTES, Fault, HEADER_BYTES, Header, MAGIC, NAME_MAX, RECORD_BYTES, Ranges,
    RawEnd, RawHeader, RawRecord, StreamError, Totals, VERSION, ZERO, rest_of_header, tag,
};

/// What a stream holds, in order: a header, ranges, the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// What is sent.
    Header(Header),
    /// What lies at an offset.
    Data {
        /// The first byte.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// A range that became zero.
    Zero {
        /// The first byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The stream was whole: its sums and its digest fit.
    End(Totals),
}

enum Part {
    /// The fixed part of the header.
    Header,
    /// Names and checksum of the header.
    Names,
    /// The fixed part of a record.
    Record,
    /// The data of the record whose fixed part came before.
    Data(RawRecord),
    /// Nothing more is expected.
    Ended,
}

/// Turns the bytes of a stream into what they mean.
///
/// The caller puts bytes into [`room`](Decoder::room) and tells how many with [`filled`](Decoder::filled).
pub struct Decoder {
    part: Part,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are there.
    have: usize,
    /// Where the header or record under way begins.
    at: u64,
    header: Vec<u8>,
    stream: u64,
    sequence: u64,
    ranges: Ranges,
    announced: (u64, u64),
    digest: blake3::Hasher,
    spare: Vec<Vec<u8>>,
    failed: Option<StreamError>,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::new()
    }
}

impl Decoder {
    /// At the beginning of a stream.
    pub fn new() -> Decoder {
        Decoder {
            part: Part::Header,
            buffer: vec![0; HEADER_BYTES],
            have: 0,
            at: 0,
            header: Vec::new(),
            stream: 0,
            sequence: 0,
            ranges: Ranges::new(0),
            announced: (0, 0),
            digest: blake3::Hasher::new(),
            spare: Vec::new(),
            failed: None,
        }
    }

    /// Where the next bytes belong. Empty at the end and after a fault.
    pub fn room(&mut self) -> &mut [u8] {
        match self.failed {
            Some(_) => &mut [],
            None => &mut self.buffer[self.have..],
        }
    }

    /// `count` bytes were put into the room, from its front on. What they complete, if anything.
    pub fn filled(&mut self, count: usize) -> Result<Option<Event>, StreamError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.have = (self.have + count).min(self.buffer.len());
        if self.have < self.buffer.len() || matches!(self.part, Part::Ended) {
            return Ok(None);
        }
        self.complete().map_err(|fault| {
            let error = StreamError { at: self.at, fault };
            self.failed = Some(error.clone());
            error
        })
    }

    /// No more bytes come: an error if some should.
    pub fn finish(&self) -> Result<(), StreamError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let part = match self.part {
            Part::Ended => return Ok(()),
            Part::Header if self.have == 0 => return Err(StreamError { at: 0, fault: Fault::NotAStream }),
            Part::Header | Part::Names => "header",
            // Whatever record is due, the end record is missing.
            Part::Record if self.have == 0 => "sequence of records, before the end record",
            Part::Record | Part::Data(_) => "record",
        };
        Err(StreamError { at: self.at, fault: Fault::CutShort(part) })
    }

    /// Bytes came after the end.
    pub fn trailing(&self) -> StreamError {
        StreamError { at: self.at, fault: Fault::Trailing }
    }

    /// Whether the end record was read.
    pub fn is_ended(&self) -> bool {
        self.failed.is_none() && matches!(self.part, Part::Ended)
    }

    /// Where the part under way begins, in bytes from the start of the stream.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Takes a buffer back that came with an [`Event::Data`].
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < 4 && buffer.capacity() <= DATA_MAX {
            self.spare.push(buffer);
        }
    }

    fn complete(&mut self) -> Result<Option<Event>, Fault> {
        match std::mem::replace(&mut self.part, Part::Ended) {
            Part::Header => {
                let names = names_len(&self.buffer)?;
                self.header = std::mem::take(&mut self.buffer);
                self.expect(Part::Names, rest_of_header(names));
                Ok(None)
            }
            Part::Names => {
                self.header.extend_from_slice(&self.buffer);
                let header = read_header(&self.header)?;
                self.digest.update(&self.header);
                self.stream = tag(header.stream);
                self.ranges = Ranges::new(header.size);
                self.announced = (header.data_bytes, header.zero_bytes);
                self.at = self.header.len() as u64;
                self.expect(Part::Record, RECORD_BYTES);
                Ok(Some(Event::Header(header)))
            }
            Part::Record => {
                let raw = RawRecord::read_from_bytes(&self.buffer).map_err(|_| Fault::Checksum("record"))?;
                let length = raw.length.get();
                // Only what bounds the memory is believed before the checksum was seen.
                let follows = match raw.kind {
                    DATA if (1..=DATA_MAX as u64).contains(&length) => length as usize,
                    ZERO => 0,
                    END if length == END_BYTES as u64 => END_BYTES,
                    _ => return Err(Fault::Checksum("record")),
                };
                if follows > 0 {
                    self.expect(Part::Data(raw), follows);
                    return Ok(None);
                }
                self.record(raw, Vec::new()).map(Some)
            }
            Part::Data(raw) => {
                let data = std::mem::take(&mut self.buffer);
                self.record(raw, data).map(Some)
            }
            Part::Ended => Ok(None),
        }
    }

    fn expect(&mut self, part: Part, bytes: usize) {
        let mut buffer = match bytes {
            ..=RECORD_BYTES => std::mem::take(&mut self.buffer),
            _ => self.spare.pop().unwrap_or_default(),
        };
        buffer.resize(bytes, 0);
        self.buffer = buffer;
        self.have = 0;
        self.part = part;
    }

    fn record(&mut self, raw: RawRecord, data: Vec<u8>) -> Result<Event, Fault> {
        if raw.checksum(&data) != raw.crc.get() {
            return Err(Fault::Checksum("record"));
        }
        if raw.stream.get() != self.stream {
            return Err(Fault::OtherStream);
        }
        if raw.sequence.get() != self.sequence {
            return Err(Fault::Sequence { expected: self.sequence, found: raw.sequence.get() });
        }
        let (offset, length) = (raw.offset.get(), raw.length.get());
        if raw.kind == END {
            return self.end(&raw, &data);
        }
        self.ranges.admit(offset, length, raw.kind == DATA)?;
        self.digest.update(raw.as_bytes());
        self.digest.update(&data);
        self.sequence += 1;
        self.at += (RECORD_BYTES + data.len()) as u64;
        self.expect(Part::Record, RECORD_BYTES);
        Ok(match raw.kind {
            DATA => Event::Data { offset, data },
            _ => Event::Zero { offset, length },
        })
    }

    fn end(&mut self, raw: &RawRecord, data: &[u8]) -> Result<Event, Fault> {
        let end = RawEnd::ref_from_bytes(data).map_err(|_| Fault::Checksum("record"))?;
        if raw.offset.get() != 0 {
            return Err(Fault::Field("the end record has an offset"));
        }
        let totals = Totals {
            data_records: end.data_records.get(),
            data_bytes: end.data_bytes.get(),
            zero_records: end.zero_records.get(),
            zero_bytes: end.zero_bytes.get(),
        };
        if totals != self.ranges.totals {
            return Err(Fault::Sums("end record"));
        }
        if (totals.data_bytes, totals.zero_bytes) != self.announced {
            return Err(Fault::Sums("header"));
        }
        if blake3::Hash::from_bytes(end.digest) != self.digest.finalize() {
            return Err(Fault::Digest);
        }
        self.at += (RECORD_BYTES + END_BYTES) as u64;
        self.buffer = Vec::new();
        self.have = 0;
        Ok(Event::End(totals))
    }
}

/// The length of the names that follow a header's fixed part.
fn names_len(fixed: &[u8]) -> Result<usize, Fault> {
    let raw = RawHeader::ref_from_bytes(fixed).map_err(|_| Fault::NotAStream)?;
    if raw.magic != MAGIC {
        return Err(Fault::NotAStream);
    }
    if raw.version.get() != VERSION {
        return Err(Fault::Version(raw.version.get()));
    }
    let (name, pool) = (usize::from(raw.name_len.get()), usize::from(raw.pool_name_len.get()));
    let length = HEADER_BYTES + rest_of_header(name + pool);
    if name > NAME_MAX || pool > NAME_MAX || raw.length.get() as usize != length {
        return Err(Fault::Checksum("header"));
    }
    Ok(name + pool)
}

fn read_header(bytes: &[u8]) -> Result<Header, Fault> {
    let damaged = Fault::Checksum("header");
    let Some((covered, crc)) = bytes.split_last_chunk::<4>() else { return Err(damaged) };
    if crate::crc32c::crc32c(covered) != u32::from_le_bytes(*crc) {
        return Err(damaged);
    }
    let Ok((raw, names)) = RawHeader::ref_from_prefix(covered) else { return Err(damaged) };
    let (name, pool) = (usize::from(raw.name_len.get()), usize::from(raw.pool_name_len.get()));
    let text = |range: std::ops::Range<usize>| {
        let name = names.get(range).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        name.ok_or(Fault::Checksum("header"))
    };
    let header = Header {
        stream: Uuid::from_bytes(raw.stream),
        uuid: Uuid::from_bytes(raw.uuid),
        base: Some(Uuid::from_bytes(raw.base)).filter(|base| !base.is_nil()),
        pool: Uuid::from_bytes(raw.pool),
        name: text(0..name)?,
        pool_name: text(name..name + pool)?,
        size: raw.size.get(),
        block_size: raw.block_size.get(),
        created: raw.created.get(),
        epoch: raw.epoch.get(),
        data_bytes: raw.data_bytes.get(),
        zero_bytes: raw.zero_bytes.get(),
    };
    if names.get(name + pool..).is_some_and(|padding| padding.iter().any(|byte| *byte != 0)) {
        return Err(Fault::Field("what is reserved in the header is not zero"));
    }
    header.check()?;
    Ok(header)
}
