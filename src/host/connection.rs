//! One NVMe/TCP connection of an initiator, without any I/O: bytes in, bytes out, commands in, completions out.
//!
//! The caller owns the socket and moves bytes between it and the machine; the machine owns PDU framing, digests, command
//! slots and the buffers of the commands in flight. Calling order:
//!
//! ```text
//!   submit() ──► transmit_slices() ► socket ► on_transmitted(n)          (until has_transmit() is false)
//!   receive_slices() ► socket ► on_received(n) ──► poll_completion()     (until None)
//!   any Err from on_received ──► transmit what is left (the termination request), close, take_in_flight()
//! ```
//!
//! States: `Greeting` (ICReq sent, ICResp awaited) → `Open` (commands flow) → `Failed` (nothing more is accepted). There
//! is no way back.
//!
//! Nothing that the target sends is trusted: every length, offset and identifier is checked against what this side
//! asked for, and the first violation fails the connection with the termination request that the specification names
//! (TCP 1.0, 3.5). Buffers are any owned bytes: `In` receives, `Out` is sent; the reactor uses DMA buffers, tools use `Vec`.
#![forbid(unsafe_code)]

mod error;
mod receive;
mod slots;
mod transmit;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut};

use zerocopy::IntoBytes;

use crate::nvme::base::SglDescriptor;
use crate::nvme::tcp::{
    self, CapsuleCmd, CommonHeader, Digests, Fes, H2cData, IcReq, PduShape, TermReq, pdu,
};
use crate::nvme::{Cqe, Sqe};

pub use error::ProtocolError;
use receive::Receive;
use slots::Slots;
use transmit::Transmit;

/// The most commands that one connection can have in flight: ten bits of the command identifier name the slot.
pub const DEPTH_MAX: u16 = 1024;

/// The most data that is put into a capsule, whatever a controller says that it takes: beyond this, R2T lets the controller
/// say when it has room.
pub const IN_CAPSULE_BYTES_MAX: u32 = 1 << 20;

/// The most slices that [`Connection::transmit_slices`] hands out at once: the kernel takes up to 1024 (UIO_MAXIOV), but
/// beyond 64 the saving per call is lost in noise.
pub const TRANSMIT_SLICES: usize = 64;

/// What is asked of the connection; what is granted is in [`Connection::granted`].
#[derive(Debug, Clone, Copy)]
pub struct ConnectionOptions {
    /// Commands in flight at most, 1 to [`DEPTH_MAX`].
    pub depth: u16,
    pub digests: Digests,
    /// Alignment wanted for the data of C2HData, as HPDA: (hpda + 1) * 4 bytes; at most [`tcp::PDA_MAX`].
    pub hpda: u8,
    /// R2Ts that a command may have outstanding, at least 1.
    pub max_r2t: u32,
    /// Bytes of data that a command may carry in its capsule.
    pub in_capsule_bytes: u32,
}

impl ConnectionOptions {
    /// An admin queue, or an I/O queue before the controller has said what it can do.
    pub fn new(depth: u16) -> ConnectionOptions {
        ConnectionOptions {
            depth,
            digests: Digests(0),
            hpda: 0,
            max_r2t: 16,
            in_capsule_bytes: tcp::ADMIN_IN_CAPSULE_MAX,
        }
    }
}

/// What the controller granted in its ICResp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granted {
    pub digests: Digests,
    /// CPDA: alignment of the data that this side sends.
    pub cpda: u8,
    /// MAXH2CDATA: the most bytes in one H2CData.
    pub max_h2c_data: u32,
}

/// The buffer that travels with a command and comes back with its completion.
#[derive(Debug)]
pub enum Data<In, Out> {
    None,
    /// Filled by the controller; the whole length is expected.
    In(In),
    /// Sent to the controller, whole.
    Out(Out),
}

/// A finished command.
#[derive(Debug)]
pub struct Completion<In, Out> {
    /// What the caller gave to [`Connection::submit`].
    pub token: u64,
    /// The completion queue entry; made up on this side when the data itself said success (the SUCCESS flag) and when
    /// its digest was wrong (Transient Transport Error).
    pub cqe: Cqe,
    pub data: Data<In, Out>,
}

/// A command that was not taken; its buffer comes back.
#[derive(Debug)]
pub struct Refused<In, Out> {
    pub why: RefusedWhy,
    pub data: Data<In, Out>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RefusedWhy {
    #[error("all command slots are in use")]
    Full,
    #[error("the connection is not open")]
    NotOpen,
    #[error("the data is longer than 4 GiB")]
    DataTooLong,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Open,
    Failed,
}

/// See the module's documentation.
pub struct Connection<In, Out> {
    phase: Phase,
    options: ConnectionOptions,
    granted: Granted,
    slots: Slots<In, Out>,
    transmit: Transmit,
    receive: Receive,
    completions: VecDeque<Completion<In, Out>>,
}

impl<In: DerefMut<Target = [u8]>, Out: Deref<Target = [u8]>> Connection<In, Out> {
    /// A connection whose ICReq waits to be transmitted. Options out of range are brought into it.
    pub fn new(options: ConnectionOptions) -> Connection<In, Out> {
        let options = ConnectionOptions {
            depth: options.depth.clamp(1, DEPTH_MAX),
            hpda: options.hpda.min(tcp::PDA_MAX),
            max_r2t: options.max_r2t.max(1),
            in_capsule_bytes: options.in_capsule_bytes.min(IN_CAPSULE_BYTES_MAX),
            ..options
        };
        let mut transmit = Transmit::new();
        transmit.stage(IcReq::new(options.hpda, options.digests, options.max_r2t).as_bytes());
        Connection {
            phase: Phase::Greeting,
            options,
            granted: Granted { digests: Digests(0), cpda: 0, max_h2c_data: tcp::MAXH2CDATA_MIN },
            slots: Slots::new(options.depth),
            transmit,
            receive: Receive::new(),
            completions: VecDeque::with_capacity(options.depth.into()),
        }
    }

    /// What the controller granted; `None` until its ICResp has come.
    pub fn granted(&self) -> Option<Granted> {
        (self.phase == Phase::Open).then_some(self.granted)
    }

    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.used()
    }

    /// Commands that may still be submitted before one must complete.
    pub fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// From now on I/O commands carry up to this many bytes of data in their capsule (IOCCSZ * 16 - 64), but never more
    /// than [`IN_CAPSULE_BYTES_MAX`].
    pub fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.options.in_capsule_bytes = bytes.min(IN_CAPSULE_BYTES_MAX);
    }

    /// Queues a command. Its command identifier and data pointer are filled in here; data that fits goes into the
    /// capsule, longer data waits for R2T. Returns the command identifier (for Abort).
    pub fn submit(&mut self, mut sqe: Sqe, data: Data<In, Out>, token: u64) -> Result<u16, Refused<In, Out>> {
        if self.phase != Phase::Open {
            return Err(Refused { why: RefusedWhy::NotOpen, data });
        }
        let len = match &data {
            Data::None => 0,
            Data::In(buf) => buf.len(),
            Data::Out(buf) => buf.len(),
        };
        let Ok(len) = u32::try_from(len) else { return Err(Refused { why: RefusedWhy::DataTooLong, data }) };
        let in_capsule = matches!(data, Data::Out(_)) && len > 0 && len <= self.options.in_capsule_bytes;
        sqe.dptr = if in_capsule { SglDescriptor::in_capsule(0, len) } else { SglDescriptor::transport(len) };

        let cid = match self.slots.take(data, token, len) {
            Ok(cid) => cid,
            Err(data) => return Err(Refused { why: RefusedWhy::Full, data }),
        };
        sqe.cid = cid.into();
        let ch = CommonHeader::bare(pdu::CAPSULE_CMD, size_of::<CapsuleCmd>());
        let mut capsule = CapsuleCmd { ch, sqe };
        let shape = self.shape(size_of::<CapsuleCmd>(), if in_capsule { len } else { 0 });
        shape.apply(&mut capsule.ch);
        self.transmit.stage_header(capsule.as_bytes(), &shape);
        if in_capsule {
            // What is sent in the capsule can no longer be asked for by R2T.
            self.slots.mark_requested(cid, len);
            self.stage_payload(cid, 0, len, false);
        }
        Ok(cid)
    }

    /// Whether there are bytes to send.
    pub fn has_transmit(&self) -> bool {
        self.transmit.is_pending()
    }

    /// The bytes to send next, in order; returns how many entries of `out` are in use.
    pub fn transmit_slices<'a>(&'a self, out: &mut [IoSlice<'a>]) -> usize {
        self.transmit.slices(|slot| self.slots.out_bytes(slot), out)
    }

    /// `bytes` of what [`Self::transmit_slices`] showed have gone out.
    pub fn on_transmitted(&mut self, bytes: usize) {
        let slots = &mut self.slots;
        let completions = &mut self.completions;
        self.transmit.advance(bytes, |slot, ends_r2t| {
            if let Some(completion) = slots.payload_sent(slot, ends_r2t) {
                completions.push_back(completion);
            }
        });
    }

    /// Where to receive into: the buffer of the read whose data is arriving (may be empty), then the read-ahead.
    pub fn receive_slices(&mut self) -> [IoSliceMut<'_>; 2] {
        let (direct, ahead) = self.receive.slices(&mut self.slots);
        [IoSliceMut::new(direct), IoSliceMut::new(ahead)]
    }

    /// `bytes` have been received into [`Self::receive_slices`]. After an error only transmission goes on: it holds the
    /// termination request.
    pub fn on_received(&mut self, bytes: usize) -> Result<(), ProtocolError> {
        if self.phase == Phase::Failed {
            return Err(ProtocolError::AlreadyFailed);
        }
        let outcome = receive::on_received(self, bytes);
        if let Err(error) = &outcome {
            self.fail(error);
        }
        outcome
    }

    /// The next finished command.
    pub fn poll_completion(&mut self) -> Option<Completion<In, Out>> {
        self.completions.pop_front()
    }

    /// Gives up the connection and returns the tokens and buffers of all commands in flight, so that none is lost.
    pub fn take_in_flight(&mut self) -> Vec<(u64, Data<In, Out>)> {
        self.phase = Phase::Failed;
        self.transmit.clear();
        self.receive.stop();
        self.slots.take_all()
    }

    fn fail(&mut self, error: &ProtocolError) {
        self.phase = Phase::Failed;
        self.receive.stop();
        if let Some((fes, fei)) = error.termination() {
            self.stage_termination(fes, fei);
        }
    }

    fn stage_termination(&mut self, fes: Fes, fei: u32) {
        let quoted = self.receive.last_header();
        let term = TermReq::new(pdu::H2C_TERM_REQ, fes, fei, quoted.len());
        self.transmit.stage(term.as_bytes());
        self.transmit.stage(quoted);
    }

    fn shape(&self, hlen: usize, data_len: u32) -> PduShape {
        PduShape::new(hlen, data_len as usize, self.granted.digests, self.granted.cpda)
    }

    /// Queues `len` bytes at `offset` of a command's data and, if in use, their digest.
    fn stage_payload(&mut self, cid: u16, offset: u32, len: u32, ends_r2t: bool) {
        let slot = Slots::<In, Out>::index(cid);
        let range = offset as usize..(offset + len) as usize;
        let digest = self.granted.digests.data().then(|| {
            let bytes = self.slots.out_bytes(slot).get(range).unwrap_or_default();
            crate::crc32c::crc32c(bytes).to_le_bytes()
        });
        self.slots.payload_queued(slot);
        self.transmit.stage_payload(slot, offset, len, ends_r2t);
        if let Some(digest) = digest {
            self.transmit.stage(&digest);
        }
    }

    /// Answers an R2T that has been checked: H2CData PDUs of at most MAXH2CDATA bytes, LAST on the final one.
    fn stage_h2c_data(&mut self, cid: u16, ttag: u16, offset: u32, len: u32) {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let piece = (end - at).min(self.granted.max_h2c_data);
            let last = at + piece == end;
            let mut ch = CommonHeader::bare(pdu::H2C_DATA, size_of::<H2cData>());
            if last {
                ch.flags |= tcp::flags::LAST_PDU;
            }
            let shape = self.shape(size_of::<H2cData>(), piece);
            shape.apply(&mut ch);
            let header = H2cData {
                ch,
                cccid: cid.into(),
                ttag: ttag.into(),
                datao: at.into(),
                datal: piece.into(),
                rsvd20: [0; 4],
            };
            self.transmit.stage_header(header.as_bytes(), &shape);
            self.stage_payload(cid, at, piece, last);
            at += piece;
        }
    }
}
