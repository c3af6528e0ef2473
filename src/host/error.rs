//! What can go wrong between this host and a controller.
#![forbid(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::connection::{ProtocolError, RefusedWhy};
use crate::nvme::Status;
use crate::nvme::fabrics::ConnectRefusal;

/// Errors are cheap to clone: the loss of a connection is told to every command that was in flight.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HostError {
    #[error("cannot connect to {addr}: {source}")]
    Connect { addr: SocketAddr, source: Arc<io::Error> },
    #[error("the connection broke: {0}")]
    Io(Arc<io::Error>),
    #[error("the controller closed the connection")]
    Closed,
    #[error("no answer within {ms} ms")]
    Timeout { ms: u64 },
    #[error(
        "no answer to {command} (opcode {opcode:02x}h, namespace {nsid}) within {ms} ms; the association ends"
    )]
    CommandTimeout { command: &'static str, opcode: u8, nsid: u32, ms: u64 },
    #[error("the controller broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("the command was not sent: {0}")]
    NotSent(#[from] RefusedWhy),
    #[error("{command} failed: {status}")]
    Status { command: &'static str, status: Status },
    #[error("Connect of queue {qid} was refused: {status}{}", refusal_text(*status, *refusal))]
    ConnectRefused { qid: u16, status: Status, refusal: ConnectRefusal },
    #[error("the controller did not become {wanted} within {ms} ms")]
    NotReady { wanted: &'static str, ms: u64 },
    #[error("the controller reports a fatal error (CSTS.CFS)")]
    Fatal,
    #[error("the controller says something that cannot be: {what}")]
    Nonsense { what: &'static str },
    #[error("{what}")]
    Invalid { what: &'static str },
    #[error("the log keeps changing while it is read")]
    LogChanging,
}

impl From<io::Error> for HostError {
    fn from(error: io::Error) -> HostError {
        HostError::Io(Arc::new(error))
    }
}

impl HostError {
    /// The status that a command ended with, if the controller had its say.
    pub fn status(&self) -> Option<Status> {
        match self {
            HostError::Status { status, .. } | HostError::ConnectRefused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

fn refusal_text(status: Status, refusal: ConnectRefusal) -> String {
    if !status.is(Status::CONNECT_INVALID_PARAMETERS) {
        return String::new();
    }
    let place = if refusal.in_data() { "data" } else { "command" };
    format!(", parameter at byte {} of the Connect {place}", refusal.offset())
}
