//! A controller as a host sees it: association, handshakes, queues (Base 2.0, 3.5.1 and 6.3).
//!
//! ```text
//!   admin queue: ICReq ► Connect ► read CAP ► CC.EN=1 ► wait CSTS.RDY ► Identify ► Number of Queues
//!   I/O queue n: ICReq ► Connect(QID n, CNTLID)                        (for each, after the above)
//! ```
#![forbid(unsafe_code)]

mod admin;
mod io;

pub use admin::keep_alive;
pub use io::{BLOCKS_MAX, COPY_RANGES_MAX, DSM_RANGES_MAX};

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;

use zerocopy::{FromZeros, IntoBytes};

use super::connection::DEPTH_MAX;
use super::{CommandQueue, ConnectionOptions, Data, HostError};
use crate::nvme::fabrics::{
    CNTLID_DYNAMIC, Cap, Cc, ConnectAttributes, ConnectCommand, ConnectData, ConnectRefusal, ConnectResult,
    Csts, PropertyCommand, property,
};
use crate::nvme::identify::IdentifyController;
use crate::nvme::tcp::{ADMIN_IN_CAPSULE_MAX, Digests};
use crate::nvme::{Cqe, Sqe, nqn};

/// Entries of the admin queue, as the specification requires at least (Base 5.16.1.23, ASQSZ).
const ADMIN_DEPTH: u16 = 31;

/// What is asked of a controller. The controller may grant less: see [`Controller::queue_count`] and
/// [`Controller::depth`].
#[derive(Debug, Clone)]
pub struct ControllerOptions {
    pub hostnqn: String,
    pub hostid: [u8; 16],
    /// I/O queues; 0 for a discovery controller.
    pub queues: u16,
    /// Commands in flight on one I/O queue, 1 to [`DEPTH_MAX`].
    pub depth: u16,
    pub digests: Digests,
    /// HPDA, see [`ConnectionOptions::hpda`].
    pub hpda: u8,
    /// R2Ts outstanding per command.
    pub max_r2t: u32,
    /// Keep Alive Timeout in milliseconds, 0 for none. Whoever sets it must call [`Controller::keep_alive`] in time.
    pub kato_ms: u32,
    /// How long a controller on a reactor may take for one command before the association ends, milliseconds; 0 for ever.
    pub command_timeout_ms: u32,
    /// Ask for SQ flow control to be off, as all common hosts do.
    pub disable_sq_flow_control: bool,
}

impl ControllerOptions {
    /// One I/O queue of 127 commands of up to 30 s, without digests or keep alive, for a host that makes up its name from `hostid`.
    pub fn new(hostid: uuid::Uuid) -> ControllerOptions {
        ControllerOptions {
            hostnqn: format!("{}{hostid}", nqn::UUID_PREFIX),
            hostid: *hostid.as_bytes(),
            queues: 1,
            depth: 127,
            digests: Digests(0),
            hpda: 0,
            max_r2t: 16,
            kato_ms: 0,
            command_timeout_ms: 30_000,
            disable_sq_flow_control: true,
        }
    }

    fn connection(&self, depth: u16) -> ConnectionOptions {
        ConnectionOptions {
            depth,
            digests: self.digests,
            hpda: self.hpda,
            max_r2t: self.max_r2t,
            in_capsule_bytes: ADMIN_IN_CAPSULE_MAX,
        }
    }
}

/// A connected controller. Dropping it closes its connections; [`Controller::shutdown`] says goodbye first.
pub struct Controller<Q> {
    admin: Rc<Q>,
    io: Vec<Q>,
    cap: Cap,
    cntlid: u16,
    identify: Box<IdentifyController>,
    depth: u16,
    next_queue: Cell<usize>,
}

impl<Q: CommandQueue> Controller<Q> {
    /// Connects to subsystem `subnqn` at `addr`, enables the controller and connects its I/O queues.
    pub async fn connect(
        addr: SocketAddr,
        subnqn: &str,
        options: &ControllerOptions,
    ) -> Result<Controller<Q>, HostError> {
        let mut controller = Controller::<Q>::connect_admin(addr, subnqn, options).await?;
        if options.queues == 0 {
            return Ok(controller);
        }
        let queues = controller.request_queues(options.queues).await?;
        let mqes = controller.cap.mqes().clamp(1, u64::from(DEPTH_MAX)) as u16;
        controller.depth = options.depth.clamp(1, mqes);
        let in_capsule_bytes = u32::try_from(controller.identify.in_capsule_bytes()).unwrap_or(u32::MAX);
        for qid in 1..=queues {
            let queue = Q::open(addr, options.connection(controller.depth)).await?;
            connect_queue(&queue, qid, controller.depth, controller.cntlid, subnqn, options).await?;
            queue.set_in_capsule_bytes(in_capsule_bytes);
            controller.io.push(queue);
        }
        Ok(controller)
    }

    /// The same without I/O queues: for discovery, and for tests that go their own way from there.
    pub async fn connect_admin(
        addr: SocketAddr,
        subnqn: &str,
        options: &ControllerOptions,
    ) -> Result<Controller<Q>, HostError> {
        let admin = Q::open(addr, options.connection(ADMIN_DEPTH)).await?;
        let cntlid = connect_queue(&admin, 0, ADMIN_DEPTH, CNTLID_DYNAMIC, subnqn, options).await?;
        let mut controller = Controller {
            admin: Rc::new(admin),
            io: Vec::new(),
            cap: Cap(0),
            cntlid,
            identify: Box::new(IdentifyController::new_zeroed()),
            depth: ADMIN_DEPTH,
            next_queue: Cell::new(0),
        };
        controller.cap = Cap(controller.property_get(property::CAP).await?);
        controller.enable().await?;
        controller.identify = controller.identify_controller().await?;
        if controller.identify.cntlid.get() != cntlid {
            return Err(HostError::Nonsense { what: "Identify gives another controller ID than Connect" });
        }
        Ok(controller)
    }

    /// Sets CC.EN and waits for CSTS.RDY, at most CAP.TO.
    pub async fn enable(&self) -> Result<(), HostError> {
        self.property_set(property::CC, Cc::ENABLE.0.into()).await?;
        self.wait_status("ready", |csts| csts.rdy()).await
    }

    /// Clears CC.EN and waits for CSTS.RDY to fall. The controller drops its I/O queues.
    pub async fn disable(&self) -> Result<(), HostError> {
        self.property_set(property::CC, Cc::ENABLE.with_en(false).0.into()).await?;
        self.wait_status("disabled", |csts| !csts.rdy()).await
    }

    /// Closes the I/O queues, tells the controller that this host leaves and waits until it has finished (CSTS.SHST).
    /// The I/O queues go first: a controller may wait for them to end.
    pub async fn shutdown(&mut self) -> Result<(), HostError> {
        self.io.clear();
        self.property_set(property::CC, Cc::ENABLE.with_shn(1).0.into()).await?;
        self.wait_status("shut down", |csts| csts.shst() == 2).await
    }

    async fn wait_status(&self, wanted: &'static str, reached: fn(Csts) -> bool) -> Result<(), HostError> {
        const STEP_MS: u64 = 2;
        // CAP.TO counts half seconds; a controller that says 0 gets one.
        let limit_ms = self.cap.to().max(1) * 500;
        let mut waited_ms = 0;
        loop {
            let csts = Csts(self.property_get(property::CSTS).await? as u32);
            if csts.cfs() {
                return Err(HostError::Fatal);
            }
            if reached(csts) {
                return Ok(());
            }
            if waited_ms >= limit_ms {
                return Err(HostError::NotReady { wanted, ms: limit_ms });
            }
            Q::pause(std::time::Duration::from_millis(STEP_MS)).await;
            waited_ms += STEP_MS;
        }
    }

    /// Reads a property, see [`property`].
    pub async fn property_get(&self, offset: u32) -> Result<u64, HostError> {
        let cqe = self.admin_command("Property Get", PropertyCommand::get(offset).to_sqe()).await?;
        Ok(match property::width(offset) {
            Some(8) => cqe.result(),
            _ => cqe.dw0.get().into(),
        })
    }

    /// Writes a property.
    pub async fn property_set(&self, offset: u32, value: u64) -> Result<(), HostError> {
        self.admin_command("Property Set", PropertyCommand::set(offset, value).to_sqe()).await.map(drop)
    }

    /// An admin command without data.
    pub async fn admin_command(&self, name: &'static str, sqe: Sqe) -> Result<Cqe, HostError> {
        let (result, _) = self.admin.execute(sqe, Data::None).await;
        succeeded(name, result?)
    }

    /// The admin queue, for commands of any kind.
    pub fn admin(&self) -> &Rc<Q> {
        &self.admin
    }

    /// The I/O queues; queue ID 1 is the first.
    pub fn io_queues(&self) -> &[Q] {
        &self.io
    }

    /// Gives up the I/O queues to a caller that drives them itself; the controller stays for its admin queue.
    pub fn take_io_queues(&mut self) -> Vec<Q> {
        std::mem::take(&mut self.io)
    }

    /// I/O queues that were granted and connected.
    pub fn queue_count(&self) -> usize {
        self.io.len()
    }

    /// Commands that one I/O queue takes at a time.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    pub fn capabilities(&self) -> Cap {
        self.cap
    }

    /// Identify Controller as it was when connecting.
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// The most bytes that one command may move (MDTS); 1 MiB when the controller has no limit.
    pub fn transfer_bytes_max(&self) -> usize {
        const UNLIMITED_BYTES: u64 = 1 << 20;
        let limit = self.identify.max_transfer_bytes(self.cap.mpsmin() as u32).unwrap_or(UNLIMITED_BYTES);
        limit.min(1 << 30) as usize
    }

    /// The I/O queues in turn.
    fn next_io_queue(&self) -> Result<&Q, HostError> {
        let next = self.next_queue.get();
        self.next_queue.set(next.wrapping_add(1));
        match self.io.len() {
            0 => Err(HostError::Invalid { what: "this controller was connected without I/O queues" }),
            len => Ok(&self.io[next % len]),
        }
    }
}

/// Sends Connect on a fresh connection; returns the controller ID.
pub async fn connect_queue<Q: CommandQueue>(
    queue: &Q,
    qid: u16,
    depth: u16,
    cntlid: u16,
    subnqn: &str,
    options: &ControllerOptions,
) -> Result<u16, HostError> {
    let attributes =
        ConnectAttributes(0).with_disable_sq_flow_control(options.disable_sq_flow_control && qid > 0);
    let kato_ms = if qid == 0 { options.kato_ms } else { 0 };
    // A queue of n entries holds n - 1 commands (Base 3.3.1.5).
    let command = ConnectCommand::new(qid, depth.saturating_add(1), attributes, kato_ms);
    let data = ConnectData::new(options.hostid, cntlid, subnqn, &options.hostnqn);
    let (result, _) = queue.execute(command.to_sqe(), Data::Out(Q::out_buffer(data.as_bytes()))).await;
    let cqe = result?;
    if !cqe.status().is_success() {
        let refusal = ConnectRefusal(cqe.dw0.get());
        return Err(HostError::ConnectRefused { qid, status: cqe.status(), refusal });
    }
    Ok(ConnectResult(cqe.dw0.get()).cntlid() as u16)
}

fn succeeded(command: &'static str, cqe: Cqe) -> Result<Cqe, HostError> {
    match cqe.status().ok() {
        Ok(()) => Ok(cqe),
        Err(status) => Err(HostError::Status { command, status }),
    }
}

#[cfg(test)]
mod tests;
