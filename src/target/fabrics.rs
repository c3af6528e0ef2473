//! Connect: who the host is, what it asks for, and whether it may have it.
//!
//! A Connect is checked in two steps: its form, which needs nothing but its bytes, and its right, which needs the
//! subsystems. Every refusal names the parameter at fault (Base 2.0, 6.3). A Host Identifier of zero is taken as it is: later
//! revisions of the specification allow it, and it identifies nobody here, as the Host NQN is compared as well.
//!
//! An empty Host NQN is a syntax error, with one exception: a host that presents a random UUID as its Host Identifier is known
//! by the NQN which that UUID makes, and allowed or refused under that name. `spdk_nvme_perf` is such a host.
//!
//! Do Not Retry is set where the same Connect cannot succeed later: wrong syntax, unknown subsystem, host not allowed. It is
//! not set where time may help, and not for an I/O queue whose controller is gone: the host is about to find that out by
//! itself, and should then be free to come back.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;

use uuid::Uuid;
use zerocopy::FromBytes;

use super::controller::{Controller, HostIdentity, JoinError, QueueSeat};
use super::service::Shared;
use super::spec::TransportOptions;
use super::subsystem::AdmitError;
use crate::nvme::base::Sqe;
use crate::nvme::fabrics::{CNTLID_DYNAMIC, ConnectCommand, ConnectData, ConnectRefusal};
use crate::nvme::nqn::{Nqn, UUID_PREFIX};
use crate::nvme::status::Status;

/// A Connect that is refused: its status, and dword 0 which says what is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    pub status: Status,
    pub parameter: ConnectRefusal,
}

impl Refusal {
    const fn parameter(parameter: ConnectRefusal) -> Refusal {
        Refusal { status: ConnectRefusal::STATUS, parameter }
    }

    /// The parameter is wrong now, and may be right later.
    const fn for_now(parameter: ConnectRefusal) -> Refusal {
        Refusal { status: Status::CONNECT_INVALID_PARAMETERS, parameter }
    }

    const fn status(status: Status) -> Refusal {
        Refusal { status, parameter: ConnectRefusal(0) }
    }
}

/// A Connect whose form is right.
#[derive(Debug, Clone)]
pub struct ConnectRequest {
    pub cid: u16,
    pub qid: u16,
    /// Entries.
    pub depth: u32,
    pub no_sq_flow_control: bool,
    pub keep_alive_ms: u32,
    pub cntlid: u16,
    pub host: HostIdentity,
    pub subsystem: Nqn,
}

impl ConnectRequest {
    pub fn parse(sqe: &Sqe, data: &[u8], options: &TransportOptions) -> Result<ConnectRequest, Refusal> {
        let command = ConnectCommand::from_sqe(sqe);
        if command.recfmt.get() != 0 {
            return Err(Refusal::status(Status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr()));
        }
        let Ok(data) = ConnectData::ref_from_bytes(data) else {
            return Err(Refusal::status(Status::DATA_SGL_LENGTH_INVALID.with_dnr()));
        };
        let sqsize = command.sqsize.get();
        if sqsize == 0 || sqsize >= options.max_queue_depth {
            return Err(Refusal::parameter(ConnectRefusal::SQSIZE));
        }
        let (qid, cntlid) = (command.qid.get(), data.cntlid.get());
        let subsystem =
            Nqn::from_field(&data.subnqn).map_err(|_| Refusal::parameter(ConnectRefusal::SUBNQN))?;
        let host = host_nqn(data).ok_or(Refusal::parameter(ConnectRefusal::HOSTNQN))?;
        // The dynamic controller model: a host cannot choose.
        if qid == 0 && cntlid != CNTLID_DYNAMIC {
            return Err(Refusal::parameter(ConnectRefusal::CNTLID));
        }
        Ok(ConnectRequest {
            cid: command.cid.get(),
            qid,
            depth: u32::from(sqsize) + 1,
            no_sq_flow_control: command.attributes().disable_sq_flow_control(),
            keep_alive_ms: command.kato.get(),
            cntlid,
            host: HostIdentity { nqn: host, id: data.hostid },
            subsystem,
        })
    }
}

/// The name of the host, given or implied.
fn host_nqn(data: &ConnectData) -> Option<Nqn> {
    let id = Uuid::from_bytes(data.hostid);
    let is_random = id.get_version_num() == 4 && id.get_variant() == uuid::Variant::RFC4122;
    if data.hostnqn.iter().all(|&byte| byte == 0) && is_random {
        return Nqn::new(&format!("{UUID_PREFIX}{id}")).ok();
    }
    Nqn::from_field(&data.hostnqn).ok()
}

/// Makes a controller for the host.
pub fn connect_admin(
    request: &ConnectRequest,
    shared: &Arc<Shared>,
    listener: SocketAddr,
    seat: QueueSeat,
    io_queues_max: u16,
) -> Result<Arc<Controller>, Refusal> {
    let absent = || absent(shared, &request.subsystem);
    let subsystem = shared.subsystem(&request.subsystem).ok_or_else(absent)?;
    let make = |cntlid, subsystem, host, access| {
        Controller::new(cntlid, subsystem, host, listener, access, seat, io_queues_max)
    };
    subsystem.admit(request.host.clone(), listener, make).map_err(|error| match error {
        AdmitError::HostNotAllowed => Refusal::status(Status::CONNECT_INVALID_HOST.with_dnr()),
        AdmitError::WrongListener => Refusal::for_now(ConnectRefusal::SUBNQN),
        AdmitError::Deleted => absent(),
        AdmitError::NoControllerLeft => Refusal::status(Status::CONNECT_CONTROLLER_BUSY),
    })
}

/// The refusal of a subsystem that is not here: for good, unless it will be back.
fn absent(shared: &Shared, nqn: &Nqn) -> Refusal {
    match shared.is_away(nqn) {
        true => Refusal::for_now(ConnectRefusal::SUBNQN),
        false => Refusal::parameter(ConnectRefusal::SUBNQN),
    }
}

/// What became of the Connect of an I/O queue.
pub enum IoConnect {
    Joined(Arc<Controller>),
    /// A queue with this id is still there. If `closing` it will go soon; else its host may just not have noticed.
    Occupied {
        closing: bool,
    },
    Refused(Refusal),
}

/// Adds a queue to a controller that the same host holds.
pub fn connect_io(
    request: &ConnectRequest,
    shared: &Arc<Shared>,
    listener: SocketAddr,
    seat: &QueueSeat,
) -> IoConnect {
    use IoConnect::Refused;
    let Some(subsystem) = shared.subsystem(&request.subsystem) else {
        return Refused(absent(shared, &request.subsystem));
    };
    if !subsystem.listens_on(listener) {
        return Refused(Refusal::for_now(ConnectRefusal::SUBNQN));
    }
    if !subsystem.allows(&request.host.nqn) {
        return Refused(Refusal::status(Status::CONNECT_INVALID_HOST.with_dnr()));
    }
    let Some(controller) = subsystem.controller(request.cntlid) else {
        return Refused(Refusal::for_now(ConnectRefusal::CNTLID));
    };
    if controller.host.nqn != request.host.nqn {
        return Refused(Refusal::parameter(ConnectRefusal::HOSTNQN));
    }
    if controller.host.id != request.host.id {
        return Refused(Refusal::parameter(ConnectRefusal::HOSTID));
    }
    // An association belongs to one port of the subsystem: who takes the port away takes all of its queues.
    if controller.listener != listener {
        return Refused(Refusal::parameter(ConnectRefusal::CNTLID));
    }
    // Discovery controllers have no I/O queues: the granted range is empty.
    match controller.join(request.qid, seat.clone()) {
        Ok(()) => IoConnect::Joined(controller),
        Err(JoinError::Exists) => IoConnect::Occupied { closing: false },
        Err(JoinError::Closing) => IoConnect::Occupied { closing: true },
        Err(JoinError::OutOfRange) => Refused(Refusal::parameter(ConnectRefusal::QID)),
        Err(JoinError::NotEnabled) => Refused(Refusal::status(Status::COMMAND_SEQUENCE_ERROR)),
        Err(JoinError::ControllerClosing) => Refused(Refusal::for_now(ConnectRefusal::CNTLID)),
    }
}

/// The answer when the queue that was in the way has not gone in time: the host may try again.
pub const STILL_OCCUPIED: Refusal = Refusal::status(Status::COMMAND_SEQUENCE_ERROR);
