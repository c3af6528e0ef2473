//! NVMe/TCP protocol data units (TCP 1.0, 3.6).
//!
//! Every PDU begins with the same eight bytes, [`CommonHeader`]; `hlen` says how long the header is, `pdo` where the
//! data begins and `plen` how long the whole is, digests and padding included:
//!
//! ```text
//!  | CH (8) | PDU specific header | HDGST (4)? | PAD? | data | DDGST (4)? |
//!  |<------------- hlen --------->|            |<-pdo from the start
//!  |<-------------------------------- plen ------------------------------->|
//! ```
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::base::{Cqe, Sqe};
use super::bits::bit_fields;

/// The TCP port of I/O controllers by convention, and the IANA port of discovery controllers (TCP 3.1.1).
pub const PORT_IO: u16 = 4420;
pub const PORT_DISCOVERY: u16 = 8009;

/// The size of a header or data digest (CRC-32C, TCP 3.3.1.1).
pub const DIGEST_LEN: usize = 4;
/// The longest header of any PDU: ICReq and ICResp.
pub const HLEN_MAX: usize = 128;
/// HPDA and CPDA at most: data aligned to (31 + 1) * 4 = 128 bytes (TCP 3.6.2.2).
pub const PDA_MAX: u8 = 31;
/// The smallest MAXH2CDATA that a controller may announce (TCP figure 28).
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Admin and Fabrics commands may carry this much data in their capsule whatever IOCCSZ says (TCP 3.3.1, Base 3.3.1.1.1).
pub const ADMIN_IN_CAPSULE_MAX: u32 = 8192;
/// The most bytes of the offending PDU that a termination request quotes (TCP figure 30).
pub const TERM_DATA_MAX: usize = 128;

/// PDU types (TCP figure 24).
pub mod pdu {
    pub const IC_REQ: u8 = 0x00;
    pub const IC_RESP: u8 = 0x01;
    pub const H2C_TERM_REQ: u8 = 0x02;
    pub const C2H_TERM_REQ: u8 = 0x03;
    pub const CAPSULE_CMD: u8 = 0x04;
    pub const CAPSULE_RESP: u8 = 0x05;
    pub const H2C_DATA: u8 = 0x06;
    pub const C2H_DATA: u8 = 0x07;
    pub const R2T: u8 = 0x09;
}

/// The PDU specific flags of byte 1 (TCP 3.6.2).
pub mod flags {
    /// A header digest follows the header.
    pub const HDGSTF: u8 = 1 << 0;
    /// A data digest follows the data.
    pub const DDGSTF: u8 = 1 << 1;
    /// The last PDU of this data transfer.
    pub const LAST_PDU: u8 = 1 << 2;
    /// C2HData only: the command succeeded and no CapsuleResp will come.
    pub const SUCCESS: u8 = 1 << 3;
}

macro_rules! pdu_struct {
    ($(#[$meta:meta])* pub struct $name:ident: $len:literal { $($body:tt)* } $($field:ident @ $offset:literal),*) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($body)* }

        const _: () = {
            assert!(size_of::<$name>() == $len);
            $( assert!(offset_of!($name, $field) == $offset); )*
        };
    };
}

pdu_struct! {
    /// The first eight bytes of every PDU (TCP figure 23).
    pub struct CommonHeader: 8 {
        pub pdu_type: u8,
        /// See [`flags`].
        pub flags: u8,
        /// Header length in bytes, digest not included.
        pub hlen: u8,
        /// PDU Data Offset: where the data begins, 0 if there is none.
        pub pdo: u8,
        /// PDU length in bytes, everything included.
        pub plen: U32,
    }
    plen @ 4
}

impl CommonHeader {
    /// A header without data, digests or flags.
    pub const fn bare(pdu_type: u8, hlen: usize) -> CommonHeader {
        CommonHeader { pdu_type, flags: 0, hlen: hlen as u8, pdo: 0, plen: U32::new(hlen as u32) }
    }

    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

pdu_struct! {
    /// Initialize Connection Request (TCP figure 27): the first PDU, from the host.
    pub struct IcReq: 128 {
        pub ch: CommonHeader,
        /// PDU Format Version: 0.
        pub pfv: U16,
        /// Host PDU Data Alignment: C2HData begins at a multiple of (hpda + 1) * 4 bytes.
        pub hpda: u8,
        /// See [`Digests`].
        pub dgst: u8,
        /// Maximum outstanding R2Ts per command, 0's based.
        pub maxr2t: U32,
        pub rsvd16: [u8; 112],
    }
    pfv @ 8, hpda @ 10, dgst @ 11, maxr2t @ 12
}

pdu_struct! {
    /// Initialize Connection Response (TCP figure 28): the controller's answer.
    pub struct IcResp: 128 {
        pub ch: CommonHeader,
        pub pfv: U16,
        /// Controller PDU Data Alignment: the data of H2CData and CapsuleCmd begins at a multiple of (cpda + 1) * 4.
        pub cpda: u8,
        /// The digests in use from now on, see [`Digests`].
        pub dgst: u8,
        /// The most data bytes in one H2CData PDU, a multiple of 4, at least [`MAXH2CDATA_MIN`].
        pub maxh2cdata: U32,
        pub rsvd16: [u8; 112],
    }
    pfv @ 8, cpda @ 10, dgst @ 11, maxh2cdata @ 12
}

bit_fields! {
    /// DGST of ICReq and ICResp.
    pub struct Digests(u8);
    flags {
        header, with_header: 0;
        data, with_data: 1;
    }
    fields {
        /// Must be zero.
        reserved, with_reserved: 7, 2;
    }
}

pdu_struct! {
    /// Host to Controller and Controller to Host Termination Request (TCP figures 29 and 30): the sender found a fatal
    /// error; up to [`TERM_DATA_MAX`] bytes of the offending PDU follow as data.
    pub struct TermReq: 24 {
        pub ch: CommonHeader,
        /// Fatal Error Status, see [`Fes`].
        pub fes: U16,
        /// Fatal Error Information: for some FES the byte offset of the offending field, or a digest.
        pub fei: U32,
        pub rsvd14: [u8; 10],
    }
    fes @ 8, fei @ 10
}

/// Fatal Error Status (TCP figures 29 and 30). The two directions share 1-3 and 5-6; 4 has two names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fes(pub u16);

impl Fes {
    pub const INVALID_HEADER_FIELD: Fes = Fes(1);
    pub const SEQUENCE_ERROR: Fes = Fes(2);
    pub const HEADER_DIGEST_ERROR: Fes = Fes(3);
    pub const DATA_OUT_OF_RANGE: Fes = Fes(4);
    pub const LIMIT_EXCEEDED: Fes = Fes(5);
    pub const UNSUPPORTED_PARAMETER: Fes = Fes(6);
}

impl std::fmt::Display for Fes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match *self {
            Fes::INVALID_HEADER_FIELD => "invalid PDU header field",
            Fes::SEQUENCE_ERROR => "PDU sequence error",
            Fes::HEADER_DIGEST_ERROR => "header digest error",
            Fes::DATA_OUT_OF_RANGE => "data transfer out of range",
            Fes::LIMIT_EXCEEDED => "data transfer or R2T limit exceeded",
            Fes::UNSUPPORTED_PARAMETER => "unsupported parameter",
            Fes(other) => return write!(f, "unknown fatal error status {other:#06x}"),
        })
    }
}

pdu_struct! {
    /// Command Capsule (TCP figure 31); in-capsule data follows at `pdo`.
    pub struct CapsuleCmd: 72 {
        pub ch: CommonHeader,
        pub sqe: Sqe,
    }
    sqe @ 8
}

pdu_struct! {
    /// Response Capsule (TCP figure 32).
    pub struct CapsuleResp: 24 {
        pub ch: CommonHeader,
        pub cqe: Cqe,
    }
    cqe @ 8
}

pdu_struct! {
    /// Host to Controller Data Transfer (TCP figure 33), an answer to an R2T.
    pub struct H2cData: 24 {
        pub ch: CommonHeader,
        /// Command Capsule CID.
        pub cccid: U16,
        /// Transfer Tag, copied from the R2T.
        pub ttag: U16,
        /// Offset of this data in the command's whole data, in bytes.
        pub datao: U32,
        /// Data length in bytes.
        pub datal: U32,
        pub rsvd20: [u8; 4],
    }
    cccid @ 8, ttag @ 10, datao @ 12, datal @ 16
}

pdu_struct! {
    /// Controller to Host Data Transfer (TCP figure 34).
    pub struct C2hData: 24 {
        pub ch: CommonHeader,
        pub cccid: U16,
        pub rsvd10: [u8; 2],
        pub datao: U32,
        pub datal: U32,
        pub rsvd20: [u8; 4],
    }
    cccid @ 8, datao @ 12, datal @ 16
}

pdu_struct! {
    /// Ready to Transfer (TCP figure 35): the controller asks for `r2tl` bytes at offset `r2to` of a command's data.
    pub struct R2t: 24 {
        pub ch: CommonHeader,
        pub cccid: U16,
        pub ttag: U16,
        pub r2to: U32,
        pub r2tl: U32,
        pub rsvd20: [u8; 4],
    }
    cccid @ 8, ttag @ 10, r2to @ 12, r2tl @ 16
}

impl IcReq {
    pub fn new(hpda: u8, dgst: Digests, maxr2t: u32) -> IcReq {
        IcReq {
            ch: CommonHeader::bare(pdu::IC_REQ, size_of::<IcReq>()),
            hpda,
            dgst: dgst.0,
            maxr2t: maxr2t.saturating_sub(1).into(),
            ..IcReq::new_zeroed()
        }
    }
}

impl IcResp {
    pub fn new(cpda: u8, dgst: Digests, maxh2cdata: u32) -> IcResp {
        IcResp {
            ch: CommonHeader::bare(pdu::IC_RESP, size_of::<IcResp>()),
            cpda,
            dgst: dgst.0,
            maxh2cdata: maxh2cdata.into(),
            ..IcResp::new_zeroed()
        }
    }
}

impl TermReq {
    /// `pdu_type` is [`pdu::H2C_TERM_REQ`] or [`pdu::C2H_TERM_REQ`]; `quoted` bytes of the offending PDU follow.
    pub fn new(pdu_type: u8, fes: Fes, fei: u32, quoted: usize) -> TermReq {
        let hlen = size_of::<TermReq>();
        let mut ch = CommonHeader::bare(pdu_type, hlen);
        ch.plen = ((hlen + quoted.min(TERM_DATA_MAX)) as u32).into();
        TermReq { ch, fes: fes.0.into(), fei: fei.into(), ..TermReq::new_zeroed() }
    }
}

impl CapsuleResp {
    pub fn new(cqe: Cqe) -> CapsuleResp {
        CapsuleResp { ch: CommonHeader::bare(pdu::CAPSULE_RESP, size_of::<CapsuleResp>()), cqe }
    }
}

impl R2t {
    pub fn new(cccid: u16, ttag: u16, r2to: u32, r2tl: u32) -> R2t {
        R2t {
            ch: CommonHeader::bare(pdu::R2T, size_of::<R2t>()),
            cccid: cccid.into(),
            ttag: ttag.into(),
            r2to: r2to.into(),
            r2tl: r2tl.into(),
            rsvd20: [0; 4],
        }
    }
}

/// Where everything of one PDU lies when it is sent: header, header digest, padding, data, data digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PduShape {
    /// Where the data begins, 0 without data.
    pub pdo: usize,
    /// Length of the whole.
    pub plen: usize,
    /// HDGSTF and DDGSTF as they apply.
    pub flags: u8,
}

impl PduShape {
    /// The shape of a PDU with a header of `hlen` bytes and `data_len` bytes of data, when `digests` are in use and the
    /// receiver wants its data aligned as `pda` (HPDA or CPDA) says. A PDU without data has neither padding nor data
    /// digest (TCP 3.3.1.1).
    pub const fn new(hlen: usize, data_len: usize, digests: Digests, pda: u8) -> PduShape {
        let mut flags = 0;
        let mut end = hlen;
        if digests.header() {
            flags |= flags::HDGSTF;
            end += DIGEST_LEN;
        }
        if data_len == 0 {
            return PduShape { pdo: 0, plen: end, flags };
        }
        let pdo = end.next_multiple_of((pda as usize + 1) * 4);
        end = pdo + data_len;
        if digests.data() {
            flags |= flags::DDGSTF;
            end += DIGEST_LEN;
        }
        PduShape { pdo, plen: end, flags }
    }

    /// Writes the shape into a common header, keeping its other flags.
    pub fn apply(&self, ch: &mut CommonHeader) {
        ch.flags |= self.flags;
        ch.pdo = self.pdo as u8;
        ch.plen = (self.plen as u32).into();
    }
}
