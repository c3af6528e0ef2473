//! The NVMe/TCP connection: a machine from PDU bytes to events, and from answers to PDU bytes.
//!
//! It owns the framing: handshake, headers, digests, alignment, Transfer Tags and what is to be sent. It knows nothing of
//! sockets, clocks, controllers or what a command means. Every header field is checked before it is used; the first
//! violation queues the termination request that names it and stops the machine for good.
//!
//! ```text
//!   WaitIcReq ──ICReq──▶ Ready ──┬─ CapsuleCmd ─▶ Event::Command
//!       │                        ├─ H2CData ───▶ payload… ─▶ Event::DataArrived
//!       │                        └─ H2CTermReq ─▶ Event::HostTerminated
//!       └────── violation ──────▶ Failed (C2HTermReq queued)
//! ```
//!
//! Calling order: [`Connection::parse`] with contiguous input until it asks for more, or, while [`Connection::payload_room`]
//! is `Some`, receive straight into that and call [`Connection::payload_received`]; then send what
//! [`Connection::transmit`] holds. Input that was not consumed is given again, with more behind it. A PDU other than the
//! payload of H2CData is only consumed whole, so the caller keeps at most [`Connection::pdu_bytes_max`] bytes.
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};
use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use super::transfer::{Arrived, DataHeaderError, TransferIndex, Transfers};
use super::transmit::Transmit;
use crate::memory::{self, DmaBuf, DmaSlice};
use crate::nvme::base::{Cqe, OPCODE_FABRICS, Sqe};
use crate::nvme::tcp::{
    ADMIN_IN_CAPSULE_MAX, C2hData, CapsuleCmd, CapsuleResp, CommonHeader, DIGEST_LEN, Digests, Fes, H2cData,
    IcReq, IcResp, PDA_MAX, PduShape, R2t, TERM_DATA_MAX, TermReq, flags, pdu,
};

/// The padding that CPDA 0 allows hosts to leave before in-capsule data: PDO is one byte, so never more than this.
const PDO_MAX: usize = 255;

/// What a connection may ask of its host, fixed when it is made.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// MAXH2CDATA of the ICResp, bytes.
    pub max_h2c_data: u32,
}

/// Something the host did that the queue must act upon.
#[derive(Debug)]
pub enum Event {
    Command {
        sqe: Sqe,
        /// Where the in-capsule data lies in the input of this very call; empty if there is none.
        inline: Range<usize>,
        /// False when the data digest of the capsule did not match.
        intact: bool,
    },
    /// All data of a transfer that [`Connection::request_data`] asked for is here.
    DataArrived(Arrived),
    /// The host reports a fatal error of ours and is about to close.
    HostTerminated { fes: u16, fei: u32 },
}

/// How far a call of [`Connection::parse`] got.
#[derive(Debug)]
pub struct Parsed {
    /// Bytes of the input that are done with.
    pub consumed: usize,
    pub event: Option<Event>,
    /// Nothing more can be done with what is left of the input: call again with more behind it.
    pub starved: bool,
}

/// The violation that ended the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    pub fes: Fes,
    pub fei: u32,
}

impl Violation {
    const fn field(offset: usize) -> Violation {
        Violation { fes: Fes::INVALID_HEADER_FIELD, fei: offset as u32 }
    }

    const fn of(fes: Fes) -> Violation {
        Violation { fes, fei: 0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    WaitIcReq,
    Ready,
    /// The host has said goodbye or was told to: nothing is read any more.
    Ended,
}

/// The data of the H2CData PDU that is being received.
struct Payload {
    /// Where it goes; nowhere once its command is abandoned.
    index: Option<TransferIndex>,
    len: usize,
    left: usize,
}

pub struct Connection {
    phase: Phase,
    limits: ConnectionLimits,
    digests: Digests,
    hpda: u8,
    in_capsule_max: u32,
    transfers: Transfers,
    payload: Option<Payload>,
    transmit: Transmit,
    violation: Option<Violation>,
}

const STARVED: Parsed = Parsed { consumed: 0, event: None, starved: true };

impl Connection {
    pub fn new(limits: ConnectionLimits) -> Connection {
        Connection {
            phase: Phase::WaitIcReq,
            limits,
            digests: Digests(0),
            hpda: 0,
            in_capsule_max: ADMIN_IN_CAPSULE_MAX,
            transfers: Transfers::default(),
            payload: None,
            transmit: Transmit::default(),
            violation: None,
        }
    }

    /// What the host did wrong, if it did.
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// Sets how much data a command capsule may carry; Fabrics commands may always carry 8192 bytes.
    pub fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes;
    }

    /// The longest PDU, data of H2CData aside, that can arrive now.
    pub fn pdu_bytes_max(&self) -> usize {
        PDO_MAX + self.in_capsule_max.max(ADMIN_IN_CAPSULE_MAX) as usize + DIGEST_LEN
    }

    pub fn transmit(&mut self) -> &mut Transmit {
        &mut self.transmit
    }

    /// Writes that wait for data from the host.
    pub fn transfers_waiting(&self) -> usize {
        self.transfers.waiting()
    }

    /// Memory of buffers that wait for data from the host, bytes.
    pub fn held_for_receiving(&self) -> usize {
        self.transfers.held()
    }

    /// Memory of data that waits to be sent, bytes.
    pub fn held_for_sending(&self) -> usize {
        self.transmit.held()
    }

    /// Bytes that hosts were asked for and have not sent.
    pub fn bytes_owed(&self) -> usize {
        self.transfers.bytes_owed()
    }

    /// Bytes that hosts were asked for and have sent, since the connection began.
    pub fn bytes_arrived(&self) -> u64 {
        self.transfers.bytes_arrived()
    }

    /// If the PDU that begins here is a command: how much data it brings at most.
    pub fn next_command(&self, input: &[u8]) -> Option<usize> {
        if self.payload.is_some() || input.first() != Some(&pdu::CAPSULE_CMD) {
            return None;
        }
        let plen = CommonHeader::ref_from_prefix(input).map_or(0, |(ch, _)| ch.plen.get() as usize);
        let bare = size_of::<CapsuleCmd>() + self.header_digest_len();
        Some(plen.saturating_sub(bare).min(self.in_capsule_max as usize))
    }

    /// Reads no further, for a reason that is not the host's fault. What is queued may still be sent.
    pub fn stop(&mut self) {
        self.phase = Phase::Ended;
        self.payload = None;
        self.transfers.clear();
    }

    // ---- receiving -------------------------------------------------------------------------------------------------

    /// Consumes one PDU, or a part of the payload of one, from the front of `input`.
    pub fn parse(&mut self, input: &[u8]) -> Parsed {
        if self.phase == Phase::Ended {
            return Parsed { consumed: input.len(), event: None, starved: true };
        }
        if self.payload.is_some() {
            return self.parse_payload(input);
        }
        let Ok((ch, _)) = CommonHeader::ref_from_prefix(input) else { return STARVED };
        let ch = *ch;
        let outcome = match (ch.pdu_type, self.phase) {
            (pdu::CAPSULE_CMD, Phase::Ready) => {
                self.parse_digested(&ch, input, size_of::<CapsuleCmd>(), Connection::parse_capsule)
            }
            (pdu::H2C_DATA, Phase::Ready) => {
                self.parse_digested(&ch, input, size_of::<H2cData>(), Connection::parse_h2c_data)
            }
            (pdu::IC_REQ, Phase::WaitIcReq) => self.parse_ic_req(&ch, input),
            (pdu::H2C_TERM_REQ, _) => self.parse_term_req(&ch, input),
            (pdu::IC_REQ | pdu::CAPSULE_CMD | pdu::H2C_DATA, _) => Err(Violation::of(Fes::SEQUENCE_ERROR)),
            _ => Err(Violation::field(offset_of!(CommonHeader, pdu_type))),
        };
        outcome.unwrap_or_else(|violation| {
            self.fail(violation, input);
            Parsed { consumed: input.len(), event: None, starved: true }
        })
    }

    /// Where payload of the current H2CData PDU goes next, so that it can be received without a copy.
    pub fn payload_room(&mut self) -> Option<&mut [u8]> {
        let payload = self.payload.as_ref()?;
        if payload.left == 0 {
            return None;
        }
        self.transfers.room(payload.index?, payload.left)
    }

    /// `len` bytes were received into [`Connection::payload_room`].
    pub fn payload_received(&mut self, len: usize) -> Option<Event> {
        let payload = self.payload.as_mut()?;
        assert!(len <= payload.left, "{len} bytes received into a room of {}", payload.left);
        payload.left -= len;
        if let Some(index) = payload.index {
            self.transfers.received(index, len);
        }
        if payload.left == 0 && !self.digests.data() {
            return self.finish_payload();
        }
        None
    }

    fn parse_payload(&mut self, input: &[u8]) -> Parsed {
        let Some(payload) = self.payload.as_mut() else { return STARVED };
        let take = payload.left.min(input.len());
        payload.left -= take;
        if let Some(index) = payload.index
            && let Some(room) = self.transfers.room(index, take)
        {
            room.copy_from_slice(&input[..take]);
            self.transfers.received(index, take);
        }
        if payload.left > 0 {
            return Parsed { consumed: take, event: None, starved: true };
        }
        // A PDU without data carries no data digest (TCP 3.3.1.1).
        if !self.digests.data() || payload.len == 0 {
            return Parsed { consumed: take, event: self.finish_payload(), starved: false };
        }
        let Some(found) = input[take..].first_chunk::<DIGEST_LEN>() else {
            return Parsed { consumed: take, event: None, starved: true };
        };
        if let Some(index) = payload.index {
            self.transfers.check_digest(index, payload.len, u32::from_le_bytes(*found));
        }
        Parsed { consumed: take + DIGEST_LEN, event: self.finish_payload(), starved: false }
    }

    fn finish_payload(&mut self) -> Option<Event> {
        let payload = self.payload.take()?;
        self.transfers.finish(payload.index?).map(Event::DataArrived)
    }

    fn parse_ic_req(&mut self, ch: &CommonHeader, input: &[u8]) -> Result<Parsed, Violation> {
        check_len(ch, size_of::<IcReq>(), size_of::<IcReq>(), size_of::<IcReq>())?;
        let Ok((request, _)) = IcReq::ref_from_prefix(input) else { return Ok(STARVED) };
        // Reserved bytes are ignored; a version, alignment or digest we do not know is not.
        if request.pfv.get() != 0 {
            return Err(Violation::field(offset_of!(IcReq, pfv)));
        }
        if request.hpda > PDA_MAX {
            return Err(Violation::field(offset_of!(IcReq, hpda)));
        }
        let asked = Digests(request.dgst);
        if asked.reserved() != 0 {
            return Err(Violation::field(offset_of!(IcReq, dgst)));
        }
        self.hpda = request.hpda;
        self.transmit.push_bytes(IcResp::new(0, asked, self.limits.max_h2c_data).as_bytes());
        self.digests = asked;
        self.phase = Phase::Ready;
        Ok(Parsed { consumed: size_of::<IcReq>(), event: None, starved: false })
    }

    /// Parses a PDU whose header has a digest if digests were agreed: a header that arrived wrong is judged by that
    /// alone, as soon as it is here, for none of its fields means anything (TCP 3.3.1.1).
    fn parse_digested(
        &mut self,
        ch: &CommonHeader,
        input: &[u8],
        hlen: usize,
        parse: impl FnOnce(&mut Connection, &CommonHeader, &[u8]) -> Result<Parsed, Violation>,
    ) -> Result<Parsed, Violation> {
        if self.digests.header() {
            if input.len() < hlen + DIGEST_LEN {
                return Ok(STARVED);
            }
            check_header_digest(input, hlen)?;
        }
        parse(self, ch, input)
    }

    fn parse_capsule(&mut self, ch: &CommonHeader, input: &[u8]) -> Result<Parsed, Violation> {
        const HLEN: usize = size_of::<CapsuleCmd>();
        let plen = check_len(ch, HLEN, HLEN + self.header_digest_len(), self.pdu_bytes_max())?;
        self.check_flags(ch, flags::HDGSTF | flags::DDGSTF)?;
        let header_end = HLEN + self.header_digest_len();
        let data = self.data_range(ch, header_end, plen)?;
        if input.len() < plen {
            return Ok(STARVED);
        }
        let Ok((capsule, _)) = CapsuleCmd::ref_from_prefix(input) else { return Ok(STARVED) };
        let limit = match capsule.sqe.opcode {
            OPCODE_FABRICS => self.in_capsule_max.max(ADMIN_IN_CAPSULE_MAX),
            _ => self.in_capsule_max,
        };
        if data.len() > limit as usize {
            return Err(Violation::of(Fes::LIMIT_EXCEEDED));
        }
        let intact = data.is_empty() || !self.digests.data() || {
            let digest = &input[data.end..plen];
            digest == crate::crc32c::crc32c(&input[data.clone()]).to_le_bytes()
        };
        Ok(Parsed {
            consumed: plen,
            event: Some(Event::Command { sqe: capsule.sqe, inline: data, intact }),
            starved: false,
        })
    }

    fn parse_h2c_data(&mut self, ch: &CommonHeader, input: &[u8]) -> Result<Parsed, Violation> {
        const HLEN: usize = size_of::<H2cData>();
        let plen = check_len(ch, HLEN, HLEN + self.header_digest_len(), u32::MAX as usize)?;
        self.check_flags(ch, flags::HDGSTF | flags::DDGSTF | flags::LAST_PDU)?;
        let header_end = HLEN + self.header_digest_len();
        let data = self.data_range(ch, header_end, plen)?;
        // The header is judged as soon as it is here; the padding before the data comes with it.
        let whole = if data.is_empty() { header_end } else { data.start };
        if input.len() < whole {
            return Ok(STARVED);
        }
        let Ok((header, _)) = H2cData::ref_from_prefix(input) else { return Ok(STARVED) };
        if header.datal.get() as usize != data.len() {
            return Err(Violation::field(offset_of!(H2cData, datal)));
        }
        if header.datal.get() > self.limits.max_h2c_data {
            return Err(Violation::of(Fes::LIMIT_EXCEEDED));
        }
        let (ttag, cid) = (header.ttag.get(), header.cccid.get());
        let (offset, len) = (header.datao.get(), header.datal.get());
        let index =
            self.transfers.accept(ttag, cid, offset, len, ch.has(flags::LAST_PDU)).map_err(|e| match e {
                DataHeaderError::UnknownTag => Violation::field(offset_of!(H2cData, ttag)),
                DataHeaderError::OutOfRange => Violation::of(Fes::DATA_OUT_OF_RANGE),
                DataHeaderError::EarlyLast => Violation::field(offset_of!(CommonHeader, flags)),
            })?;
        self.payload = Some(Payload { index, len: data.len(), left: data.len() });
        let mut parsed = self.parse_payload(&input[whole..]);
        parsed.consumed += whole;
        Ok(parsed)
    }

    fn parse_term_req(&mut self, ch: &CommonHeader, input: &[u8]) -> Result<Parsed, Violation> {
        const HLEN: usize = size_of::<TermReq>();
        let plen = check_len(ch, HLEN, HLEN, HLEN + TERM_DATA_MAX)?;
        if input.len() < plen {
            return Ok(STARVED);
        }
        let Ok((request, _)) = TermReq::ref_from_prefix(input) else { return Ok(STARVED) };
        self.phase = Phase::Ended;
        self.transfers.clear();
        let event = Event::HostTerminated { fes: request.fes.get(), fei: request.fei.get() };
        Ok(Parsed { consumed: plen, event: Some(event), starved: true })
    }

    fn header_digest_len(&self) -> usize {
        if self.digests.header() { DIGEST_LEN } else { 0 }
    }

    /// Digest flags must be those that were agreed, as far as they apply, and no unknown flag may be set.
    fn check_flags(&self, ch: &CommonHeader, allowed: u8) -> Result<(), Violation> {
        const AT_FLAGS: Violation = Violation::field(offset_of!(CommonHeader, flags));
        if ch.flags & !allowed != 0 || ch.has(flags::HDGSTF) != self.digests.header() {
            return Err(AT_FLAGS);
        }
        // Without data there is no data digest, whatever the flag says.
        if ch.has(flags::DDGSTF) && !self.digests.data() {
            return Err(AT_FLAGS);
        }
        Ok(())
    }

    /// Where the data of a PDU lies, by PDO and PLEN. The digest, if any, follows it up to `plen`.
    fn data_range(
        &self,
        ch: &CommonHeader,
        header_end: usize,
        plen: usize,
    ) -> Result<Range<usize>, Violation> {
        let pdo = usize::from(ch.pdo);
        if plen == header_end {
            return if pdo == 0 || pdo == header_end {
                Ok(header_end..header_end)
            } else {
                Err(Violation::field(offset_of!(CommonHeader, pdo)))
            };
        }
        if pdo < header_end || !pdo.is_multiple_of(4) {
            return Err(Violation::field(offset_of!(CommonHeader, pdo)));
        }
        let digest = if self.digests.data() { DIGEST_LEN } else { 0 };
        if plen <= pdo + digest {
            return Err(Violation::field(offset_of!(CommonHeader, plen)));
        }
        if ch.has(flags::DDGSTF) != self.digests.data() {
            return Err(Violation::field(offset_of!(CommonHeader, flags)));
        }
        Ok(pdo..plen - digest)
    }

    // ---- sending ---------------------------------------------------------------------------------------------------

    /// Ends the connection because of what the host did: the request that names it is all that is still to be sent after
    /// what is queued. `offending` begins with the PDU's header.
    pub fn fail(&mut self, violation: Violation, offending: &[u8]) {
        if self.phase == Phase::Ended {
            return;
        }
        self.phase = Phase::Ended;
        self.violation = Some(violation);
        self.payload = None;
        self.transfers.clear();
        let hlen = offending.get(offset_of!(CommonHeader, hlen)).map_or(0, |&hlen| usize::from(hlen));
        let quoted = &offending[..hlen.min(offending.len()).min(TERM_DATA_MAX)];
        let request = TermReq::new(pdu::C2H_TERM_REQ, violation.fes, violation.fei, quoted.len());
        self.transmit.push_bytes(request.as_bytes());
        self.transmit.push_bytes(quoted);
    }

    /// Ends the connection for a reason that is not one PDU's: more commands than the queue holds, for example.
    pub fn fail_with(&mut self, fes: Fes) {
        self.fail(Violation::of(fes), &[]);
    }

    /// Asks the host for the data of command `cid`, to be received into `buf`. `token` comes back with the data.
    pub fn request_data(&mut self, token: u32, cid: u16, buf: DmaBuf) -> Result<(), DmaBuf> {
        let len = buf.len() as u32;
        let ttag = self.transfers.open(token, cid, buf)?;
        self.push_bare(R2t::new(cid, ttag, 0, len));
        Ok(())
    }

    /// Gives up the data that command `token` waits for; it may still come and is thrown away.
    pub fn abandon_data(&mut self, token: u32) -> bool {
        let payload = self.payload.as_mut();
        self.transfers.abandon(token, |index| match payload {
            Some(payload) if payload.index == Some(index) => {
                payload.index = None;
                payload.left
            }
            _ => 0,
        })
    }

    /// Completes a command.
    pub fn respond(&mut self, cqe: Cqe) {
        if self.phase != Phase::Ready {
            return;
        }
        self.push_bare(CapsuleResp::new(cqe));
    }

    /// Queues a PDU that is a header and nothing else.
    fn push_bare<P: IntoBytes + FromBytes>(&mut self, mut header: P) {
        if !self.digests.header() {
            return self.transmit.push_bytes(header.as_mut_bytes());
        }
        let shape = PduShape::new(size_of::<P>(), 0, self.digests, 0);
        let bytes = header.as_mut_bytes();
        if let Ok((ch, _)) = CommonHeader::mut_from_prefix(bytes) {
            shape.apply(ch);
        }
        self.transmit.push_bytes(bytes);
        let digest = crate::crc32c::crc32c(bytes);
        self.transmit.push_bytes(&digest.to_le_bytes());
    }

    /// Sends the data of command `cid`, all in one PDU. With `success` it also completes the command, and no response
    /// capsule may follow.
    pub fn send_data(&mut self, cid: u16, data: DmaSlice, success: bool) {
        let len = data.len();
        self.send_padded(cid, data, len, success);
    }

    /// As [`Connection::send_data`], with zeros behind `data` up to `len` bytes. The zeros take no memory.
    pub fn send_padded(&mut self, cid: u16, data: DmaSlice, len: usize, success: bool) {
        if self.phase != Phase::Ready {
            return;
        }
        const HLEN: usize = size_of::<C2hData>();
        let shape = PduShape::new(HLEN, len, self.digests, self.hpda);
        let mut header = C2hData {
            ch: CommonHeader::bare(pdu::C2H_DATA, HLEN),
            cccid: cid.into(),
            rsvd10: [0; 2],
            datao: 0.into(),
            datal: (len as u32).into(),
            rsvd20: [0; 4],
        };
        header.ch.flags = flags::LAST_PDU | if success { flags::SUCCESS } else { 0 };
        shape.apply(&mut header.ch);
        self.transmit.push_bytes(header.as_bytes());
        let mut end = HLEN;
        if self.digests.header() {
            self.transmit.push_bytes(&crate::crc32c::crc32c(header.as_bytes()).to_le_bytes());
            end += DIGEST_LEN;
        }
        if shape.pdo > end {
            self.transmit.push_bytes(&[0; PDO_MAX][..shape.pdo - end]);
        }
        let mut digest = self.digests.data().then(|| crate::crc32c::crc32c(&data));
        let mut missing = len - data.len();
        self.transmit.push_data(data);
        while missing > 0 {
            let zeros = memory::zeros(missing);
            missing -= zeros.len();
            digest = digest.map(|sum| crate::crc32c::append(sum, &zeros));
            self.transmit.push_shared(zeros);
        }
        if let Some(digest) = digest {
            self.transmit.push_bytes(&digest.to_le_bytes());
        }
    }
}

fn check_header_digest(input: &[u8], hlen: usize) -> Result<(), Violation> {
    let found = input[hlen..].first_chunk::<DIGEST_LEN>().map(|bytes| u32::from_le_bytes(*bytes));
    let expected = crate::crc32c::crc32c(&input[..hlen]);
    if found == Some(expected) {
        return Ok(());
    }
    // FEI carries the digest that was received (TCP figure 30).
    Err(Violation { fes: Fes::HEADER_DIGEST_ERROR, fei: found.unwrap_or(0) })
}

/// Checks HLEN and PLEN, and returns PLEN.
fn check_len(ch: &CommonHeader, hlen: usize, plen_min: usize, plen_max: usize) -> Result<usize, Violation> {
    if usize::from(ch.hlen) != hlen {
        return Err(Violation::field(offset_of!(CommonHeader, hlen)));
    }
    let plen = ch.plen.get() as usize;
    if plen < plen_min || plen > plen_max {
        return Err(Violation::field(offset_of!(CommonHeader, plen)));
    }
    Ok(plen)
}

#[cfg(test)]
#[path = "connection/tests.rs"]
mod tests;
