//! How a connection becomes a queue: its first command, and what becomes of it.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::{Endpoint, Queue, Role};
use crate::memory::DmaBuf;
use crate::nvme::base::{Cqe, OPCODE_FABRICS, SglKind, Sqe};
use crate::nvme::fabrics::{ConnectData, fctype};
use crate::nvme::status::Status;
use crate::target::admin::AdminQueue;
use crate::target::controller::QueueSeat;
use crate::target::fabrics::{self, ConnectRequest, IoConnect, Refusal, STILL_OCCUPIED};
use crate::target::io::{Inline, IoQueue};
use crate::target::share::Share;

/// How long a Connect waits for a queue of the same id whose host has gone, but whose end was not seen yet.
const OCCUPIED_LIMIT: Duration = Duration::from_millis(300);
/// How long it waits for one that is being drained.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);
/// How often it looks.
const OCCUPIED_POLL: Duration = Duration::from_millis(1);

impl Queue {
    /// Only a Connect may come first.
    pub(super) fn on_first_command(&mut self, sqe: &Sqe, inline: Inline<'_>, now: Instant) {
        let cid = sqe.cid.get();
        let refuse = |this: &mut Queue, status| this.answer(cid, status, 0);
        if sqe.opcode != OPCODE_FABRICS || sqe.fctype() != fctype::CONNECT {
            return refuse(self, Status::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        if sqe.command_flags().fuse() != 0 {
            return refuse(self, Status::INVALID_FIELD.with_dnr());
        }
        if !inline.intact {
            return refuse(self, Status::TRANSIENT_TRANSPORT_ERROR);
        }
        let len = sqe.dptr.length.get() as usize;
        if len != size_of::<ConnectData>() {
            return refuse(self, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        match sqe.dptr.kind() {
            SglKind::InCapsule if sqe.dptr.address.get() != 0 => {
                refuse(self, Status::SGL_OFFSET_INVALID.with_dnr());
            }
            SglKind::InCapsule if inline.range.len() != len => {
                refuse(self, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            }
            SglKind::InCapsule => self.connect(sqe, &inline.chunk[inline.range], now),
            SglKind::Transport => match self.conn.request_data(0, cid, DmaBuf::uninit(len)) {
                Ok(()) => self.role = Role::ConnectData { sqe: Box::new(*sqe) },
                Err(_) => refuse(self, Status::COMMAND_INTERRUPTED),
            },
            SglKind::Other(_) => refuse(self, Status::SGL_TYPE_INVALID.with_dnr()),
        }
    }

    pub(super) fn connect(&mut self, sqe: &Sqe, data: &[u8], now: Instant) {
        let request = match ConnectRequest::parse(sqe, data, &self.endpoint.options) {
            Ok(request) => request,
            Err(refusal) => return self.refuse(sqe.cid.get(), refusal),
        };
        if request.qid == 0 {
            return self.connect_admin(&request, now);
        }
        self.connect_io(Box::new(request), now, None);
    }

    fn connect_admin(&mut self, request: &ConnectRequest, now: Instant) {
        let Endpoint { shared, options, listener, local, inbox, .. } = &self.endpoint;
        let is_discovery = request.subsystem.is_discovery();
        let io_queues_max = if is_discovery { 0 } else { options.max_io_queues };
        let seat = self.seat(request.depth);
        let controller = match fabrics::connect_admin(request, shared, *listener, seat, io_queues_max) {
            Ok(controller) => controller,
            Err(refusal) => return self.refuse(request.cid, refusal),
        };
        info!(
            host = %controller.host.nqn.as_str(),
            subsystem = %controller.subsystem.nqn.as_str(),
            cntlid = controller.cntlid,
            peer = %self.endpoint.peer,
            "host connected"
        );
        controller.saw_traffic(shared.now_ms(now));
        let cntlid = controller.cntlid;
        let (shared, options) = (Arc::clone(shared), Arc::clone(options));
        let admin = AdminQueue::new(controller, shared, options, Arc::clone(inbox), *local, request);
        self.role = Role::Admin(Box::new(admin));
        self.accept(request, cntlid);
    }

    pub(super) fn connect_io(&mut self, request: Box<ConnectRequest>, now: Instant, since: Option<Instant>) {
        let Endpoint { shared, options, listener, .. } = &self.endpoint;
        match fabrics::connect_io(&request, shared, *listener, &self.seat(request.depth)) {
            IoConnect::Joined(controller) => {
                debug!(
                    cntlid = controller.cntlid,
                    qid = request.qid,
                    depth = request.depth,
                    reactor = self.endpoint.reactor,
                    "I/O queue connected"
                );
                controller.saw_traffic(shared.now_ms(now));
                let cntlid = controller.cntlid;
                let share = Share::of(&shared.shares, controller.reserve.clone());
                let mut io = IoQueue::new(
                    controller,
                    request.qid,
                    request.depth,
                    request.no_sq_flow_control,
                    options.c2h_success,
                    options.max_io_size,
                    share,
                );
                io.refresh_namespaces(&mut self.conn);
                self.conn.set_in_capsule_max(options.in_capsule_data_size);
                self.role = Role::Io(Box::new(io));
                self.accept(&request, cntlid);
            }
            IoConnect::Occupied { closing } => {
                // Judged each time: an old queue whose end was not seen at first has more time once it is.
                let limit = if closing { CLOSING_LIMIT } else { OCCUPIED_LIMIT };
                let since = since.unwrap_or(now);
                if now >= since + limit {
                    self.refuse(request.cid, STILL_OCCUPIED);
                    self.role = Role::New;
                } else {
                    self.role = Role::Joining { request, since, next_try: now + OCCUPIED_POLL };
                }
            }
            IoConnect::Refused(refusal) => {
                self.refuse(request.cid, refusal);
                self.role = Role::New;
            }
        }
    }

    fn seat(&self, depth: u32) -> QueueSeat {
        QueueSeat {
            inbox: Arc::clone(&self.endpoint.inbox),
            depth,
            reactor: self.endpoint.reactor,
            local: self.endpoint.local,
            peer: self.endpoint.peer,
        }
    }

    fn accept(&mut self, request: &ConnectRequest, cntlid: u16) {
        // FFFFh says that SQ flow control is off, as was asked (Base 6.3).
        let sqhd = if request.no_sq_flow_control { 0xFFFF } else { (1 % request.depth) as u16 };
        let cqe = Cqe::new(request.cid, Status::SUCCESS).with_result(cntlid.into()).with_sqhd(sqhd);
        self.conn.respond(cqe);
    }

    fn refuse(&mut self, cid: u16, refusal: Refusal) {
        debug!(peer = %self.endpoint.peer, status = %refusal.status, parameter = ?refusal.parameter, "connect refused");
        self.answer(cid, refusal.status, refusal.parameter.0.into());
    }
}
