//! The receiving half: framing, checks and data placement.
//!
//! ```text
//!            ┌──────── whole header here ───────┐
//!            ▼                                  │ no data, or data complete (and its digest)
//!   Header ──┴─ C2HData ──► Data ──► Digest ────┘
//! ```
//!
//! While a read's data is arriving the socket is read straight into its buffer; what follows in the same call lands in
//! the read-ahead. The read-ahead is kept short while large transfers flow, so that their bytes are not copied twice.
#![forbid(unsafe_code)]

use std::ops::{Deref, DerefMut};

use zerocopy::FromBytes;

use super::slots::Slots;
use super::{Connection, Data, Granted, Phase, ProtocolError};
use crate::nvme::tcp::{
    self, C2hData, CapsuleResp, CommonHeader, DIGEST_LEN, Digests, IcResp, MAXH2CDATA_MIN, PDA_MAX, R2t,
    TermReq, flags, pdu,
};
use crate::nvme::{Cqe, Status};

/// The read-ahead buffer: about thirty reads of 4 KiB in one system call.
const AHEAD_BYTES: usize = 128 * 1024;
/// How much of it is used while transfers are large.
const AHEAD_LARGE_BYTES: usize = 4 * 1024;
/// A transfer of this size or more is large: the copy it would cost outweighs one more system call.
const LARGE_TRANSFER_BYTES: usize = 16 * 1024;

/// Where data PDUs have their CCCID, and where the CID stands in a response capsule.
const CCCID_AT: u32 = std::mem::offset_of!(C2hData, cccid) as u32;
const CQE_CID_AT: u32 = (std::mem::offset_of!(CapsuleResp, cqe) + std::mem::offset_of!(Cqe, cid)) as u32;

enum State {
    Header,
    /// `left` bytes for the slot's buffer from `at` on.
    Data {
        slot: u16,
        at: usize,
        left: usize,
        crc: u32,
        flags: u8,
    },
    /// The data digest follows; `crc` is what it must be.
    Digest {
        slot: u16,
        crc: u32,
        flags: u8,
    },
    Stopped,
}

pub(super) struct Receive {
    state: State,
    ahead: Box<[u8]>,
    /// Bytes in `ahead` that have not been looked at; they start at 0 between calls.
    filled: usize,
    ahead_limit: usize,
    /// The header that is being judged, for the termination request.
    header: [u8; tcp::HLEN_MAX],
    header_len: usize,
}

impl Receive {
    pub fn new() -> Receive {
        Receive {
            state: State::Header,
            ahead: vec![0; AHEAD_BYTES].into(),
            filled: 0,
            ahead_limit: AHEAD_BYTES,
            header: [0; tcp::HLEN_MAX],
            header_len: 0,
        }
    }

    pub fn stop(&mut self) {
        self.state = State::Stopped;
    }

    /// The header of the PDU that was being handled.
    pub fn last_header(&self) -> &[u8] {
        &self.header[..self.header_len]
    }

    pub fn slices<'a, In, Out>(&'a mut self, slots: &'a mut Slots<In, Out>) -> (&'a mut [u8], &'a mut [u8])
    where
        In: DerefMut<Target = [u8]>,
        Out: Deref<Target = [u8]>,
    {
        let direct = match self.state {
            State::Data { slot, at, left, .. } => &mut slots.in_bytes(slot)[at..at + left],
            _ => &mut [],
        };
        // A header never needs more than 255 bytes, and what is left over from the last call is less than a header.
        let end = self.ahead_limit.max(self.filled + 512).min(AHEAD_BYTES);
        (direct, &mut self.ahead[self.filled..end])
    }
}

/// Takes `bytes` that were received into [`Receive::slices`].
pub(super) fn on_received<In, Out>(conn: &mut Connection<In, Out>, bytes: usize) -> Result<(), ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let mut ahead_bytes = bytes;
    if let State::Data { slot, at, left, crc, .. } = &mut conn.receive.state {
        let direct = bytes.min(*left);
        if conn.granted.digests.data() {
            let range = *at..*at + direct;
            *crc = crate::crc32c::append(*crc, &conn.slots.in_bytes(*slot)[range]);
        }
        *at += direct;
        *left -= direct;
        ahead_bytes -= direct;
    }
    conn.receive.filled += ahead_bytes;
    assert!(
        conn.receive.filled <= AHEAD_BYTES,
        "more bytes were reported as received than there was room for"
    );

    let mut at = 0;
    let outcome = loop {
        match step(conn, &mut at) {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    let receive = &mut conn.receive;
    receive.ahead.copy_within(at..receive.filled, 0);
    receive.filled -= at;
    outcome
}

/// Handles one thing at `at` of the read-ahead; `false` when more bytes are needed first.
fn step<In, Out>(conn: &mut Connection<In, Out>, at: &mut usize) -> Result<bool, ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let receive = &mut conn.receive;
    let available = &receive.ahead[*at..receive.filled];
    match receive.state {
        State::Header => header(conn, at),
        State::Data { slot, left: 0, crc, flags, .. } => {
            if flags & flags::DDGSTF != 0 {
                receive.state = State::Digest { slot, crc, flags };
            } else {
                receive.state = State::Header;
                data_complete(conn, slot, flags)?;
            }
            Ok(true)
        }
        State::Data { slot, at: to, left, crc, flags } => {
            let n = left.min(available.len());
            if n == 0 {
                return Ok(false);
            }
            let available = &available[..n];
            let crc = if flags & flags::DDGSTF != 0 { crate::crc32c::append(crc, available) } else { crc };
            conn.slots.in_bytes(slot)[to..to + n].copy_from_slice(available);
            *at += n;
            receive.state = State::Data { slot, at: to + n, left: left - n, crc, flags };
            Ok(true)
        }
        State::Digest { slot, crc, flags } => {
            let Some(digest) = available.first_chunk::<DIGEST_LEN>() else { return Ok(false) };
            if u32::from_le_bytes(*digest) != crc {
                conn.slots.slot(slot).digest_error = true;
            }
            *at += DIGEST_LEN;
            receive.state = State::Header;
            data_complete(conn, slot, flags)?;
            Ok(true)
        }
        State::Stopped => Ok(false),
    }
}

/// Reads one header with its digest and, but for C2HData, the rest of its PDU.
fn header<In, Out>(conn: &mut Connection<In, Out>, at: &mut usize) -> Result<bool, ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let receive = &mut conn.receive;
    let available = &receive.ahead[*at..receive.filled];
    let Ok((ch, _)) = CommonHeader::read_from_prefix(available) else { return Ok(false) };
    let hlen = usize::from(ch.hlen);
    let quoted = hlen.min(available.len()).min(tcp::HLEN_MAX);
    receive.header[..quoted].copy_from_slice(&available[..quoted]);
    receive.header_len = quoted;

    check_common(&ch, conn.phase)?;
    // Digests apply from the first PDU after ICResp, but never to termination requests (TCP 1.0, 3.3.1.1).
    let digested = conn.granted.digests.header() && !matches!(ch.pdu_type, pdu::IC_RESP | pdu::C2H_TERM_REQ);
    if ch.has(flags::HDGSTF) != digested {
        return Err(field(&ch, "HDGSTF", ch.flags.into(), "digests are used as ICResp said", 1));
    }
    let header_end = hlen + if digested { DIGEST_LEN } else { 0 };
    let is_data = ch.pdu_type == pdu::C2H_DATA;
    let plen = ch.plen.get() as usize;
    let need = if is_data { usize::from(ch.pdo).max(header_end) } else { plen };
    if !is_data && ch.pdu_type != pdu::C2H_TERM_REQ && plen != header_end {
        return Err(field(&ch, "PLEN", plen as u64, "this PDU has no data", 4));
    }
    if available.len() < need {
        return Ok(false);
    }
    if digested {
        let computed = crate::crc32c::crc32c(&available[..hlen]);
        let found = available[hlen..].first_chunk::<DIGEST_LEN>().map_or(0, |d| u32::from_le_bytes(*d));
        if found != computed {
            return Err(ProtocolError::HeaderDigest { found, computed });
        }
    }
    receive.header[..hlen].copy_from_slice(&available[..hlen]);
    receive.header_len = hlen;
    *at += need;
    let bytes = receive.header;
    match ch.pdu_type {
        pdu::IC_RESP => ic_resp(conn, &parse(&bytes)),
        pdu::CAPSULE_RESP => capsule_resp(conn, &parse(&bytes)),
        pdu::C2H_DATA => c2h_data(conn, &parse(&bytes), header_end),
        pdu::R2T => r2t(conn, &parse(&bytes)),
        _ => {
            let term: TermReq = parse(&bytes);
            Err(ProtocolError::Terminated { fes: tcp::Fes(term.fes.get()), fei: term.fei.get() })
        }
    }?;
    Ok(true)
}

/// A header from a buffer that is at least as long as any header.
fn parse<T: FromBytes>(bytes: &[u8; tcp::HLEN_MAX]) -> T {
    const { assert!(size_of::<T>() <= tcp::HLEN_MAX) };
    match T::read_from_prefix(bytes) {
        Ok((header, _)) => header,
        Err(_) => T::new_zeroed(),
    }
}

fn field(ch: &CommonHeader, field: &'static str, value: u64, rule: &'static str, at: u32) -> ProtocolError {
    ProtocolError::HeaderField { pdu_type: ch.pdu_type, field, value, rule, at }
}

/// What holds for every PDU before its own fields are looked at.
fn check_common(ch: &CommonHeader, phase: Phase) -> Result<(), ProtocolError> {
    let hlen = match (ch.pdu_type, phase) {
        (pdu::IC_RESP, Phase::Greeting) => size_of::<IcResp>(),
        (pdu::C2H_TERM_REQ, _) => size_of::<TermReq>(),
        (pdu::CAPSULE_RESP, Phase::Open) => size_of::<CapsuleResp>(),
        (pdu::C2H_DATA, Phase::Open) => size_of::<C2hData>(),
        (pdu::R2T, Phase::Open) => size_of::<R2t>(),
        (pdu_type, Phase::Greeting) => {
            return Err(ProtocolError::UnexpectedPdu { pdu_type, phase: "before ICResp" });
        }
        (pdu_type, _) => {
            return Err(ProtocolError::UnexpectedPdu { pdu_type, phase: "from a controller after ICResp" });
        }
    };
    if usize::from(ch.hlen) != hlen {
        return Err(field(ch, "HLEN", ch.hlen.into(), "this type has another header length", 2));
    }
    let plen = ch.plen.get() as usize;
    if plen < hlen {
        return Err(field(ch, "PLEN", plen as u64, "shorter than the header", 4));
    }
    if ch.pdu_type == pdu::C2H_TERM_REQ && plen > hlen + tcp::TERM_DATA_MAX {
        return Err(field(ch, "PLEN", plen as u64, "longer than a termination request can be", 4));
    }
    Ok(())
}

fn ic_resp<In, Out>(conn: &mut Connection<In, Out>, resp: &IcResp) -> Result<(), ProtocolError> {
    let (ch, digests) = (&resp.ch, Digests(resp.dgst));
    if resp.pfv.get() != 0 {
        return Err(field(ch, "PFV", resp.pfv.get().into(), "only 0 is known", 8));
    }
    if resp.cpda > PDA_MAX {
        return Err(field(ch, "CPDA", resp.cpda.into(), "at most 31", 10));
    }
    if digests.0 & !conn.options.digests.0 != 0 {
        return Err(field(ch, "DGST", resp.dgst.into(), "grants digests that were not asked for", 11));
    }
    let max_h2c_data = resp.maxh2cdata.get();
    if max_h2c_data < MAXH2CDATA_MIN || !max_h2c_data.is_multiple_of(4) {
        return Err(field(ch, "MAXH2CDATA", max_h2c_data.into(), "a multiple of 4, at least 4096", 12));
    }
    conn.granted = Granted { digests, cpda: resp.cpda, max_h2c_data };
    conn.phase = Phase::Open;
    Ok(())
}

fn capsule_resp<In, Out>(conn: &mut Connection<In, Out>, resp: &CapsuleResp) -> Result<(), ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let cid = resp.cqe.cid.get();
    let (index, slot) = conn.slots.lookup(cid, CQE_CID_AT)?;
    if resp.cqe.status().is_success() && matches!(slot.data, Data::In(_)) && slot.received < slot.len {
        return Err(ProtocolError::ShortData { cid, received: slot.received, total: slot.len });
    }
    conn.completions.extend(conn.slots.complete(index, resp.cqe));
    Ok(())
}

fn c2h_data<In, Out>(
    conn: &mut Connection<In, Out>,
    pdu: &C2hData,
    header_end: usize,
) -> Result<(), ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let ch = &pdu.ch;
    let (cid, offset, len) = (pdu.cccid.get(), pdu.datao.get(), pdu.datal.get());
    let (index, slot) = conn.slots.lookup(cid, CCCID_AT)?;
    if !matches!(slot.data, Data::In(_)) {
        return Err(ProtocolError::DataNotWanted { cid });
    }
    if len == 0 {
        return Err(field(ch, "DATAL", 0, "a data PDU carries data", 16));
    }
    let digested = conn.granted.digests.data();
    if ch.has(flags::DDGSTF) != digested {
        return Err(field(ch, "DDGSTF", ch.flags.into(), "digests are used as ICResp said", 1));
    }
    if ch.has(flags::SUCCESS) && !ch.has(flags::LAST_PDU) {
        return Err(field(ch, "SUCCESS", ch.flags.into(), "only together with LAST_PDU", 1));
    }
    let pdo = usize::from(ch.pdo);
    let alignment = (usize::from(conn.options.hpda) + 1) * 4;
    if pdo < header_end || !pdo.is_multiple_of(alignment) {
        return Err(field(ch, "PDO", ch.pdo.into(), "behind the header and aligned as HPDA asks", 3));
    }
    let plen = pdo as u64 + u64::from(len) + if digested { DIGEST_LEN as u64 } else { 0 };
    if u64::from(ch.plen.get()) != plen {
        return Err(field(ch, "PLEN", ch.plen.get().into(), "PDO + DATAL + digest", 4));
    }
    // Data of one command comes in order and without gaps (TCP 1.0, 3.3.2.1).
    if offset != slot.received || len > slot.len - slot.received {
        return Err(ProtocolError::DataOutOfRange {
            cid,
            offset,
            len,
            expected: slot.received,
            total: slot.len,
        });
    }
    slot.received += len;
    if ch.has(flags::SUCCESS) && slot.received < slot.len {
        return Err(ProtocolError::ShortData { cid, received: slot.received, total: slot.len });
    }
    let len = len as usize;
    conn.receive.ahead_limit = if len >= LARGE_TRANSFER_BYTES { AHEAD_LARGE_BYTES } else { AHEAD_BYTES };
    conn.receive.state = State::Data { slot: index, at: offset as usize, left: len, crc: 0, flags: ch.flags };
    Ok(())
}

/// All bytes of one C2HData are in the buffer.
fn data_complete<In, Out>(conn: &mut Connection<In, Out>, index: u16, flags: u8) -> Result<(), ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    if flags & flags::SUCCESS != 0 {
        conn.completions.extend(conn.slots.complete(index, Cqe::new(0, Status::SUCCESS)));
    }
    Ok(())
}

fn r2t<In, Out>(conn: &mut Connection<In, Out>, pdu: &R2t) -> Result<(), ProtocolError>
where
    In: DerefMut<Target = [u8]>,
    Out: Deref<Target = [u8]>,
{
    let (cid, offset, len) = (pdu.cccid.get(), pdu.r2to.get(), pdu.r2tl.get());
    let limit = conn.options.max_r2t;
    let (_, slot) = conn.slots.lookup(cid, CCCID_AT)?;
    if !matches!(slot.data, Data::Out(_)) {
        return Err(ProtocolError::DataNotWanted { cid });
    }
    if len == 0 || offset != slot.requested || len > slot.len - slot.requested {
        return Err(ProtocolError::DataOutOfRange {
            cid,
            offset,
            len,
            expected: slot.requested,
            total: slot.len,
        });
    }
    if slot.open_r2ts >= limit {
        return Err(ProtocolError::R2tLimit { cid, limit });
    }
    slot.requested += len;
    slot.open_r2ts += 1;
    conn.stage_h2c_data(cid, pdu.ttag.get(), offset, len);
    Ok(())
}
