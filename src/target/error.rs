//! Why the target refuses what its operator asks for.
//!
//! What a *host* does wrong never becomes one of these: it becomes an NVMe status or a termination request.
#![forbid(unsafe_code)]

use std::net::SocketAddr;

use thiserror::Error;

use crate::nvme::nqn::NqnError;

/// A refused change of the target's configuration. Nothing was changed.
#[derive(Debug, Error)]
pub enum TargetError {
    #[error("{nqn:?} is not a usable NQN: {source}")]
    Nqn { nqn: String, source: NqnError },
    #[error("the discovery subsystem's NQN cannot name another subsystem")]
    ReservedNqn,
    #[error("subsystem {nqn} exists already")]
    SubsystemExists { nqn: String },
    #[error("there is no subsystem {nqn}")]
    NoSubsystem { nqn: String },
    #[error("{field} is {len} bytes long, at most {max} are allowed")]
    TextTooLong { field: &'static str, len: usize, max: usize },
    #[error("{field} must be printable ASCII")]
    TextNotAscii { field: &'static str },
    #[error("serial number {serial:?} is already that of subsystem {nqn}")]
    SerialInUse { serial: String, nqn: String },
    #[error("controller ids must satisfy 1 <= min ({min}) <= max ({max}) <= 65519")]
    ControllerIds { min: u16, max: u16 },
    #[error("max_namespaces is {found}, it must lie between 1 and {max}")]
    MaxNamespaces { found: u32, max: u32 },
    #[error("namespace id {nsid} does not lie between 1 and the subsystem's max_namespaces, {max}")]
    NamespaceId { nsid: u32, max: u32 },
    #[error("namespace id {nsid} is in use in subsystem {nqn}")]
    NamespaceIdInUse { nsid: u32, nqn: String },
    #[error("all {max} namespace ids of subsystem {nqn} are in use")]
    NamespacesFull { max: u32, nqn: String },
    #[error("ANA group {group} does not lie between 1 and the subsystem's max_namespaces, {max}")]
    AnaGroup { group: u32, max: u32 },
    #[error("subsystem {nqn} does not report asymmetric namespace access; create it with ana_reporting")]
    AnaNotReported { nqn: String },
    #[error("there is no namespace {nsid} in subsystem {nqn}")]
    NoNamespace { nsid: u32, nqn: String },
    #[error("{what} {value} is already that of namespace {nsid}")]
    DuplicateIdentity { what: &'static str, value: String, nsid: u32 },
    #[error("a block size of {block_size} bytes is not possible here: {why}")]
    BlockSize { block_size: u32, why: String },
    #[error("a namespace of {size} bytes cannot be exported: {why}")]
    Size { size: u64, why: String },
    #[error("cannot listen on {addr}: {source}")]
    Listen { addr: SocketAddr, source: std::io::Error },
    #[error("subsystem {nqn} does not listen on {addr}")]
    NoListener { addr: SocketAddr, nqn: String },
    #[error("subsystem {nqn} listens on {addr} already")]
    ListenerExists { addr: SocketAddr, nqn: String },
    #[error("host {host} is already allowed to use subsystem {nqn}")]
    HostExists { host: String, nqn: String },
    #[error("host {host} is not in the allow list of subsystem {nqn}")]
    NoHost { host: String, nqn: String },
    #[error("hosts do not reach {what} any more, but commands are still running on it; try again")]
    StillInUse { what: String },
    #[error("{field} is {found}, it must lie between {min} and {max}")]
    Transport { field: &'static str, found: u64, min: u64, max: u64 },
    #[error("there is no reactor to serve connections")]
    NoReactor,
}

impl TargetError {
    /// The object that was named is not there.
    pub fn is_not_found(&self) -> bool {
        use TargetError::*;
        matches!(self, NoSubsystem { .. } | NoNamespace { .. } | NoListener { .. } | NoHost { .. })
    }

    /// The object that was to be made is there already, or another one holds what must be unique.
    pub fn is_conflict(&self) -> bool {
        use TargetError::*;
        matches!(
            self,
            SubsystemExists { .. }
                | SerialInUse { .. }
                | NamespaceIdInUse { .. }
                | NamespacesFull { .. }
                | DuplicateIdentity { .. }
                | ListenerExists { .. }
                | HostExists { .. }
        )
    }

    /// The parameter at fault, by the name it has in the specs, if it was a parameter.
    pub fn field(&self) -> Option<&'static str> {
        use TargetError::*;
        Some(match self {
            Nqn { .. } | ReservedNqn | SubsystemExists { .. } | NoSubsystem { .. } => "nqn",
            TextTooLong { field, .. } | TextNotAscii { field } | Transport { field, .. } => field,
            SerialInUse { .. } => "serial_number",
            ControllerIds { .. } => "min_cntlid",
            MaxNamespaces { .. } => "max_namespaces",
            NamespaceId { .. } | NamespaceIdInUse { .. } | NamespacesFull { .. } | NoNamespace { .. } => {
                "nsid"
            }
            DuplicateIdentity { what, .. } => what,
            AnaGroup { .. } => "anagrpid",
            AnaNotReported { .. } => "ana_state",
            BlockSize { .. } => "block_size",
            Size { .. } => "bdev_name",
            Listen { .. } | NoListener { .. } | ListenerExists { .. } => "listen_address",
            HostExists { .. } | NoHost { .. } => "host",
            StillInUse { .. } | NoReactor => return None,
        })
    }
}
