//! What a connection still has to send: PDU headers in one contiguous buffer, data by reference.
//!
//! Everything that one turn of a connection produces is gathered here and leaves in one vectored send. Data is never
//! copied: a segment refers to the slice that the device filled, and holds it until its last byte is sent.
//!
//! ```text
//!  head:      [hdr][hdr][hdr][hdr+resp]........        segments: Head(72) Data Head(24) Data Head(48)
//!              ^start                  ^end
//! ```
//!
//! The queue is bounded by its owner: no command is taken while too many bytes of answers are pending, and no read is
//! started while too much data is.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::memory::{self, DmaSlice};

/// Sent header bytes are given back once this many have piled up in front.
const HEAD_COMPACT_BYTES: usize = 64 * 1024;

enum Segment {
    /// That many bytes of `head`.
    Head(usize),
    Data {
        data: DmaSlice,
        /// The memory that this view alone holds, bytes.
        held: usize,
    },
}

#[derive(Default)]
pub struct Transmit {
    head: Vec<u8>,
    /// Bytes of `head` that are sent already.
    head_start: usize,
    segments: VecDeque<Segment>,
    pending: usize,
    /// Memory that the data holds, bytes.
    held: usize,
    /// Bytes sent since the beginning.
    sent: u64,
}

impl Transmit {
    /// Bytes not sent yet.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Of these, bytes that were copied here.
    pub fn pending_copied(&self) -> usize {
        self.head.len() - self.head_start
    }

    /// Memory that data holds until it is sent, bytes.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Bytes sent since the connection began.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    pub fn is_empty(&self) -> bool {
        self.pending == 0
    }

    /// Appends bytes by copying them: headers, digests, padding, small answers.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.head.extend_from_slice(bytes);
        self.pending += bytes.len();
        if let Some(Segment::Head(len)) = self.segments.back_mut() {
            *len += bytes.len();
        } else {
            self.segments.push_back(Segment::Head(bytes.len()));
        }
    }

    /// Appends a slice by reference, the only one to its memory.
    pub fn push_data(&mut self, data: DmaSlice) {
        let held = memory::footprint(data.len());
        self.push_view(data, held);
    }

    /// Appends a slice of memory that others hold in any case.
    pub fn push_shared(&mut self, data: DmaSlice) {
        self.push_view(data, 0);
    }

    fn push_view(&mut self, data: DmaSlice, held: usize) {
        if data.is_empty() {
            return;
        }
        self.pending += data.len();
        self.held += held;
        self.segments.push_back(Segment::Data { data, held });
    }

    /// Fills `out` with as many of the first pending segments as fit and returns how many it used.
    pub fn gather<'a>(&'a self, out: &mut [IoSlice<'a>]) -> usize {
        let mut at = self.head_start;
        let mut used = 0;
        for (segment, slot) in self.segments.iter().zip(out.iter_mut()) {
            *slot = IoSlice::new(match segment {
                Segment::Head(len) => {
                    at += len;
                    &self.head[at - len..at]
                }
                Segment::Data { data, .. } => data,
            });
            used += 1;
        }
        used
    }

    /// Takes note that the first `count` pending bytes are sent, and lets go of their data.
    pub fn advance(&mut self, mut count: usize) {
        assert!(count <= self.pending, "{count} bytes sent of {} pending", self.pending);
        self.pending -= count;
        self.sent += count as u64;
        while count > 0 {
            let Some(front) = self.segments.front_mut() else { break };
            let len = match front {
                Segment::Head(len) => *len,
                Segment::Data { data, .. } => data.len(),
            };
            let sent = len.min(count);
            count -= sent;
            if let Segment::Head(left) = front {
                self.head_start += sent;
                *left -= sent;
            } else if let Segment::Data { data, held } = front {
                match sent < len {
                    true => data.advance(sent),
                    false => self.held -= *held,
                }
            }
            if sent == len {
                self.segments.pop_front();
            }
        }
        if self.segments.is_empty() {
            self.head.clear();
            self.head_start = 0;
        } else if self.head_start > HEAD_COMPACT_BYTES {
            self.head.drain(..self.head_start);
            self.head_start = 0;
        }
    }

    /// Drops everything that is pending.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.head.clear();
        self.head_start = 0;
        self.pending = 0;
        self.held = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(transmit: &mut Transmit, step: usize, slots: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        while !transmit.is_empty() {
            let mut iov = vec![IoSlice::new(&[]); slots];
            let used = transmit.gather(&mut iov);
            let mut room = step;
            for slice in &iov[..used] {
                let take = slice.len().min(room);
                sent.extend_from_slice(&slice[..take]);
                room -= take;
            }
            transmit.advance(step - room);
        }
        sent
    }

    #[test]
    fn any_split_of_the_sends_keeps_the_order_of_bytes() {
        let data: Vec<u8> = (0..200u8).collect();
        let mut expected = Vec::new();
        for step in [1, 2, 3, 7, 24, 25, 1000] {
            for slots in [1, 2, 5, 64] {
                let mut transmit = Transmit::default();
                expected.clear();
                for round in 0..4u8 {
                    transmit.push_bytes(&[round; 24]);
                    transmit.push_bytes(&[round | 0x80; 3]);
                    transmit.push_data(DmaSlice::copy_of(&data));
                    transmit.push_shared(DmaSlice::copy_of(&[1]));
                    transmit.push_data(DmaSlice::copy_of(&[]));
                    expected.extend_from_slice(&[round; 24]);
                    expected.extend_from_slice(&[round | 0x80; 3]);
                    expected.extend_from_slice(&data);
                    expected.push(1);
                }
                assert_eq!((transmit.pending(), transmit.held()), (expected.len(), 4 * 4096));
                assert_eq!(drain(&mut transmit, step, slots), expected, "step {step} slots {slots}");
                assert_eq!((transmit.pending(), transmit.held()), (0, 0));
            }
        }
    }

    #[test]
    fn headers_that_follow_each_other_leave_as_one_piece() {
        let mut transmit = Transmit::default();
        for _ in 0..10 {
            transmit.push_bytes(&[1; 24]);
        }
        let mut iov = [IoSlice::new(&[]); 4];
        assert_eq!(transmit.gather(&mut iov), 1);
        assert_eq!(iov[0].len(), 240);
    }

    #[test]
    fn a_queue_that_never_runs_dry_does_not_grow_without_end() {
        let mut transmit = Transmit::default();
        transmit.push_bytes(&[0; 24]);
        for _ in 0..100_000 {
            transmit.push_bytes(&[0; 24]);
            transmit.advance(24);
        }
        assert!(transmit.head.len() <= HEAD_COMPACT_BYTES + 48, "{} bytes kept", transmit.head.len());
    }
}
