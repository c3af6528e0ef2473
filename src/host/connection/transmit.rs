//! What waits to be sent: headers and small things in one staging buffer, payload by reference to its slot.
//!
//! Neighbouring headers share one segment, so a burst of reads is one slice of 72 bytes each, and a burst of writes is
//! one vectored call that takes headers from here and data from the callers' buffers.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::nvme::tcp::{DIGEST_LEN, PduShape, flags};

enum Segment {
    /// The next `len` bytes of the staging buffer.
    Staged { len: usize },
    /// Bytes of a slot's buffer.
    Payload { slot: u16, offset: u32, len: u32, ends_r2t: bool },
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Segment::Staged { len } => *len,
            Segment::Payload { len, .. } => *len as usize,
        }
    }
}

pub(super) struct Transmit {
    staged: Vec<u8>,
    /// Bytes at the front of `staged` that belong to segments already popped.
    staged_gone: usize,
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that have been sent.
    front_sent: usize,
}

/// The staging buffer is moved together when this many dead bytes stand at its front.
const COMPACT_BYTES: usize = 64 * 1024;

impl Transmit {
    pub fn new() -> Transmit {
        Transmit {
            staged: Vec::with_capacity(16 * 1024),
            staged_gone: 0,
            segments: VecDeque::new(),
            front_sent: 0,
        }
    }

    pub fn is_pending(&self) -> bool {
        !self.segments.is_empty()
    }

    pub fn stage(&mut self, bytes: &[u8]) {
        self.staged.extend_from_slice(bytes);
        self.grow_staged(bytes.len());
    }

    /// A header, its digest and the padding before its data.
    pub fn stage_header(&mut self, header: &[u8], shape: &PduShape) {
        self.stage(header);
        let mut end = header.len();
        if shape.flags & flags::HDGSTF != 0 {
            self.stage(&crate::crc32c::crc32c(header).to_le_bytes());
            end += DIGEST_LEN;
        }
        let padding = shape.pdo.saturating_sub(end);
        self.staged.resize(self.staged.len() + padding, 0);
        self.grow_staged(padding);
    }

    pub fn stage_payload(&mut self, slot: u16, offset: u32, len: u32, ends_r2t: bool) {
        self.segments.push_back(Segment::Payload { slot, offset, len, ends_r2t });
    }

    fn grow_staged(&mut self, added: usize) {
        if added == 0 {
            return;
        }
        match self.segments.back_mut() {
            Some(Segment::Staged { len }) => *len += added,
            _ => self.segments.push_back(Segment::Staged { len: added }),
        }
    }

    /// Shows what is to be sent; `bytes_of` gives a slot's buffer.
    pub fn slices<'a>(&'a self, bytes_of: impl Fn(u16) -> &'a [u8], out: &mut [IoSlice<'a>]) -> usize {
        let mut staged_at = self.staged_gone;
        let mut skip = self.front_sent;
        let mut used = 0;
        for (segment, entry) in self.segments.iter().zip(out.iter_mut()) {
            let bytes = match segment {
                Segment::Staged { len } => {
                    let bytes = &self.staged[staged_at..staged_at + len];
                    staged_at += len;
                    bytes
                }
                Segment::Payload { slot, offset, len, .. } => {
                    &bytes_of(*slot)[*offset as usize..(*offset + *len) as usize]
                }
            };
            *entry = IoSlice::new(&bytes[skip..]);
            skip = 0;
            used += 1;
        }
        used
    }

    /// `bytes` have gone out; `payload_sent(slot, ends_r2t)` is called for each payload piece that is complete.
    pub fn advance(&mut self, mut bytes: usize, mut payload_sent: impl FnMut(u16, bool)) {
        while let Some(front) = self.segments.front() {
            let left = front.len() - self.front_sent;
            if bytes < left {
                self.front_sent += bytes;
                return;
            }
            bytes -= left;
            self.front_sent = 0;
            match self.segments.pop_front() {
                Some(Segment::Staged { len }) => self.staged_gone += len,
                Some(Segment::Payload { slot, ends_r2t, .. }) => payload_sent(slot, ends_r2t),
                None => {}
            }
        }
        assert_eq!(bytes, 0, "more bytes were reported as sent than there were");
        self.compact();
    }

    fn compact(&mut self) {
        if self.segments.is_empty() {
            self.staged.clear();
            self.staged_gone = 0;
        } else if self.staged_gone >= COMPACT_BYTES {
            self.staged.drain(..self.staged_gone);
            self.staged_gone = 0;
        }
    }

    pub fn clear(&mut self) {
        self.segments.clear();
        self.front_sent = 0;
        self.compact();
    }
}
