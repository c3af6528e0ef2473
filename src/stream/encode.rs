//! Writing a stream.
#![forbid(unsafe_code)]

use zerocopy::IntoBytes;

use super::{
    DATA, END, END_BYTES, Fault, HEADER_BYTES, Header, MAGIC, RECORD_BYTES, Ranges, RawEnd, RawHeader,
    RawRecord, StreamError, Totals, VERSION, ZERO, rest_of_header, tag,
};

/// Turns ranges into the bytes of a stream.
pub struct Encoder {
    stream: u64,
    sequence: u64,
    ranges: Ranges,
    digest: blake3::Hasher,
    announced: (u64, u64),
    at: u64,
}

impl Encoder {
    /// An encoder, and the first bytes of the stream.
    pub fn new(header: &Header) -> Result<(Encoder, Vec<u8>), StreamError> {
        header.check().map_err(|fault| StreamError { at: 0, fault })?;
        let names = header.name.len() + header.pool_name.len();
        let length = HEADER_BYTES + rest_of_header(names);
        let raw = RawHeader {
            magic: MAGIC,
            version: VERSION.into(),
            length: (length as u32).into(),
            stream: *header.stream.as_bytes(),
            uuid: *header.uuid.as_bytes(),
            base: header.base.map_or([0; 16], |base| *base.as_bytes()),
            pool: *header.pool.as_bytes(),
            size: header.size.into(),
            created: header.created.into(),
            epoch: header.epoch.into(),
            data_bytes: header.data_bytes.into(),
            zero_bytes: header.zero_bytes.into(),
            block_size: header.block_size.into(),
            name_len: (header.name.len() as u16).into(),
            pool_name_len: (header.pool_name.len() as u16).into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        bytes.extend_from_slice(header.name.as_bytes());
        bytes.extend_from_slice(header.pool_name.as_bytes());
        bytes.resize(length - size_of::<u32>(), 0);
        bytes.extend_from_slice(&crate::crc32c::crc32c(&bytes).to_le_bytes());
        let mut encoder = Encoder {
            stream: tag(header.stream),
            sequence: 0,
            ranges: Ranges::new(header.size),
            digest: blake3::Hasher::new(),
            announced: (header.data_bytes, header.zero_bytes),
            at: bytes.len() as u64,
        };
        encoder.digest.update(&bytes);
        Ok((encoder, bytes))
    }

    /// The bytes that go before `data`, which is what lies at `offset`.
    pub fn data(&mut self, offset: u64, data: &[u8]) -> Result<[u8; RECORD_BYTES], StreamError> {
        self.admit(offset, data.len() as u64, true)?;
        Ok(self.record(DATA, offset, data.len() as u64, data))
    }

    /// The bytes that say that a range became zero.
    pub fn zero(&mut self, offset: u64, length: u64) -> Result<[u8; RECORD_BYTES], StreamError> {
        self.admit(offset, length, false)?;
        Ok(self.record(ZERO, offset, length, &[]))
    }

    /// The last bytes.
    pub fn end(mut self) -> Result<Vec<u8>, StreamError> {
        let totals = self.totals();
        if (totals.data_bytes, totals.zero_bytes) != self.announced {
            return Err(StreamError { at: self.at, fault: Fault::Sums("header") });
        }
        let raw = RawEnd {
            data_records: totals.data_records.into(),
            data_bytes: totals.data_bytes.into(),
            zero_records: totals.zero_records.into(),
            zero_bytes: totals.zero_bytes.into(),
            digest: *self.digest.finalize().as_bytes(),
        };
        let mut bytes = self.record(END, 0, END_BYTES as u64, raw.as_bytes()).to_vec();
        bytes.extend_from_slice(raw.as_bytes());
        Ok(bytes)
    }

    /// What the records so far add up to.
    pub fn totals(&self) -> Totals {
        self.ranges.totals
    }

    fn admit(&mut self, offset: u64, length: u64, is_data: bool) -> Result<(), StreamError> {
        let at = self.at;
        self.ranges.admit(offset, length, is_data).map_err(|fault| StreamError { at, fault })
    }

    fn record(&mut self, kind: [u8; 4], offset: u64, length: u64, data: &[u8]) -> [u8; RECORD_BYTES] {
        let mut raw = RawRecord {
            kind,
            crc: 0.into(),
            stream: self.stream.into(),
            sequence: self.sequence.into(),
            offset: offset.into(),
            length: length.into(),
        };
        raw.crc = raw.checksum(data).into();
        let mut bytes = [0; RECORD_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        self.digest.update(&bytes);
        self.digest.update(data);
        self.sequence += 1;
        self.at += (bytes.len() + data.len()) as u64;
        bytes
    }
}
