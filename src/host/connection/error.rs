//! What a target can do wrong, and what this side answers.
#![forbid(unsafe_code)]

use crate::nvme::tcp::Fes;

/// A violation of NVMe/TCP by the controller. It ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("the controller sent a PDU of type {pdu_type:#04x}, which may not come {phase}")]
    UnexpectedPdu { pdu_type: u8, phase: &'static str },
    #[error("PDU type {pdu_type:#04x}: {field} is {value}, {rule}")]
    HeaderField {
        pdu_type: u8,
        field: &'static str,
        value: u64,
        rule: &'static str,
        /// Byte offset of the field in the PDU.
        at: u32,
    },
    #[error("the header digest of a PDU is {found:#010x}, its header gives {computed:#010x}")]
    HeaderDigest { found: u32, computed: u32 },
    #[error("the controller named command {cid:#06x}, which is not in flight")]
    UnknownCommand {
        cid: u16,
        /// Byte offset of the identifier in the PDU.
        at: u32,
    },
    #[error("the controller sent data for command {cid:#06x}, which asked for none")]
    DataNotWanted { cid: u16 },
    #[error(
        "command {cid:#06x}: the controller moves {len} bytes at offset {offset} where offset {expected} of {total} is next"
    )]
    DataOutOfRange { cid: u16, offset: u32, len: u32, expected: u32, total: u32 },
    #[error("command {cid:#06x} succeeded after {received} of {total} bytes of its data")]
    ShortData { cid: u16, received: u32, total: u32 },
    #[error("command {cid:#06x}: more than the {limit} outstanding R2Ts that were agreed")]
    R2tLimit { cid: u16, limit: u32 },
    #[error("the controller ended the connection: {fes} (information {fei:#x})")]
    Terminated { fes: Fes, fei: u32 },
    #[error("the connection has failed before")]
    AlreadyFailed,
}

impl ProtocolError {
    /// The Fatal Error Status and Information to answer with (TCP 1.0, figure 29); `None` when nothing is to be said.
    pub fn termination(&self) -> Option<(Fes, u32)> {
        Some(match *self {
            ProtocolError::UnexpectedPdu { .. } => (Fes::SEQUENCE_ERROR, 0),
            ProtocolError::HeaderField { at, .. } => (Fes::INVALID_HEADER_FIELD, at),
            ProtocolError::HeaderDigest { computed, .. } => (Fes::HEADER_DIGEST_ERROR, computed),
            ProtocolError::UnknownCommand { at, .. } => (Fes::INVALID_HEADER_FIELD, at),
            ProtocolError::DataNotWanted { .. } => (Fes::INVALID_HEADER_FIELD, 8),
            ProtocolError::DataOutOfRange { .. } => (Fes::DATA_OUT_OF_RANGE, 0),
            ProtocolError::ShortData { .. } => (Fes::SEQUENCE_ERROR, 0),
            ProtocolError::R2tLimit { .. } => (Fes::LIMIT_EXCEEDED, 0),
            ProtocolError::Terminated { .. } | ProtocolError::AlreadyFailed => return None,
        })
    }
}
