//! What the operator asks the target for, and what it shows of itself.
//!
//! Specs go in and are checked where they are used; views come out and are snapshots without any tie to the live objects.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::time::Duration;

use uuid::Uuid;

use super::ana::AnaState;
use super::error::TargetError;
use super::namespace::Backend;

/// The NSIDs a subsystem has when its spec does not say: NN and MNAN are reported to hosts, some of which allocate for
/// each possible one, so it stays modest.
pub const MAX_NAMESPACES_DEFAULT: u32 = 256;
/// The most NSIDs a subsystem can be made with.
pub const MAX_NAMESPACES_LIMIT: u32 = 4096;
/// The model number of a subsystem when its spec does not say.
pub const MODEL_NUMBER_DEFAULT: &str = "Rimrock";

/// A subsystem to create.
#[derive(Debug, Clone)]
pub struct SubsystemSpec {
    pub nqn: String,
    /// At most 20 ASCII characters. Empty: made from the NQN, so that it is the same after a restart.
    pub serial_number: String,
    /// At most 40 ASCII characters.
    pub model_number: String,
    /// Whether hosts that are not in the allow list may connect.
    pub allow_any_host: bool,
    /// The highest NSID, which is also how many namespaces there may be.
    pub max_namespaces: u32,
    /// The controller ids that Connect hands out, both ends included.
    pub min_cntlid: u16,
    pub max_cntlid: u16,
    /// Whether hosts are told how each listener reaches the namespaces (asymmetric namespace access).
    pub ana_reporting: bool,
}

impl SubsystemSpec {
    pub fn new(nqn: impl Into<String>) -> SubsystemSpec {
        SubsystemSpec {
            nqn: nqn.into(),
            serial_number: String::new(),
            model_number: MODEL_NUMBER_DEFAULT.into(),
            allow_any_host: false,
            max_namespaces: MAX_NAMESPACES_DEFAULT,
            min_cntlid: 1,
            max_cntlid: crate::nvme::fabrics::CNTLID_MAX,
            ana_reporting: false,
        }
    }
}

/// A namespace to add to a subsystem.
#[derive(Debug, Clone)]
pub struct NamespaceSpec {
    /// The NSID, or the lowest free one.
    pub nsid: Option<u32>,
    pub backend: Backend,
    /// The name the operator knows the backend by; only shown.
    pub bdev_name: String,
    /// The namespace's UUID; the backend's own by default.
    pub uuid: Option<Uuid>,
    /// The NGUID; the UUID's bytes by default.
    pub nguid: Option<[u8; 16]>,
    /// The EUI-64, none by default.
    pub eui64: Option<[u8; 8]>,
    /// Bytes of a logical block, 512 or 4096. A device can only be exported with its own block size.
    pub block_size: u32,
    /// Refuse writes although the backend would take them. A read-only backend is always read-only.
    pub read_only: bool,
    /// The ANA group, 1 to the subsystem's `max_namespaces`; one of its own, which is that of its NSID, by default.
    pub ana_group: Option<u32>,
}

impl NamespaceSpec {
    /// `backend` with the block size that suits it best and every identity taken from it.
    pub fn new(backend: Backend, bdev_name: impl Into<String>) -> NamespaceSpec {
        NamespaceSpec {
            nsid: None,
            bdev_name: bdev_name.into(),
            uuid: None,
            nguid: None,
            eui64: None,
            block_size: backend.native_block_size(),
            read_only: false,
            ana_group: None,
            backend,
        }
    }
}

/// When a read's data may carry its completion with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum C2hSuccess {
    /// Never: each read ends with a response capsule.
    Off,
    /// On queues whose host has switched SQ flow control off, as the specification wants it (TCP 1.0, 3.3.2.1).
    #[default]
    Auto,
    /// Always, as some targets do; hosts that keep SQ flow control on must not depend on SQHD.
    Always,
}

/// The limits of connections that are made from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportOptions {
    /// Entries of a queue, 16 to 1024 (CAP.MQES + 1).
    pub max_queue_depth: u16,
    /// I/O queues of one controller, 1 to 1024.
    pub max_io_queues: u16,
    /// Data an I/O command may carry in its capsule, bytes, 0 to 65536, a multiple of 16.
    pub in_capsule_data_size: u32,
    /// The largest transfer of one command (MDTS), bytes, a power of two, 128 KiB to 16 MiB.
    pub max_io_size: u32,
    /// The most bytes of one H2CData PDU (MAXH2CDATA), 4096 to 16 MiB, a multiple of 4096.
    pub max_h2c_data: u32,
    pub c2h_success: C2hSuccess,
    /// TCP connections at the same time; further ones are closed at once.
    pub max_connections: u32,
    /// Outstanding Asynchronous Event Requests of a controller, 1 to 256.
    pub max_async_events: u16,
    /// How long an address stays open whose last subsystem was deleted.
    ///
    /// A host whose connection ends does not know why. Linux tries to reconnect every ten seconds (`reconnect_delay`), by
    /// default for ten minutes (`ctrl_loss_tmo`), and holds back all I/O meanwhile: a refused TCP connection tells it
    /// nothing, since it looks just like a target that restarts. A Connect that is refused with Do Not Retry makes it give
    /// the controller up at once. So the address answers for long enough that a host with usual settings meets that answer,
    /// and not for ever, as somebody else may want the address.
    pub farewell: Duration,
}

impl Default for TransportOptions {
    fn default() -> TransportOptions {
        TransportOptions {
            max_queue_depth: 1024,
            max_io_queues: 128,
            in_capsule_data_size: 8192,
            max_io_size: 1 << 20,
            max_h2c_data: 1 << 20,
            c2h_success: C2hSuccess::Auto,
            max_connections: 4096,
            max_async_events: 4,
            farewell: Duration::from_secs(60),
        }
    }
}

impl TransportOptions {
    /// Names the first value that is out of its range.
    pub fn check(&self) -> Result<(), TargetError> {
        let range = |field, found: u64, min: u64, max: u64, granule: u64| {
            if found < min || found > max || !found.is_multiple_of(granule) {
                return Err(TargetError::Transport { field, found, min, max });
            }
            Ok(())
        };
        range("max_queue_depth", self.max_queue_depth.into(), 16, 1024, 1)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_queues.into(), 1, 1024, 1)?;
        range("in_capsule_data_size", self.in_capsule_data_size.into(), 0, 65536, 16)?;
        range("max_io_size", self.max_io_size.into(), 128 << 10, 16 << 20, 128 << 10)?;
        if !self.max_io_size.is_power_of_two() {
            return Err(TargetError::Transport {
                field: "max_io_size",
                found: self.max_io_size.into(),
                min: 128 << 10,
                max: 16 << 20,
            });
        }
        range("max_h2c_data", self.max_h2c_data.into(), 4096, 16 << 20, 4096)?;
        range("max_connections", self.max_connections.into(), 1, 1 << 20, 1)?;
        range("max_async_events", self.max_async_events.into(), 1, 256, 1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubsystemKind {
    Discovery,
    Nvme,
}

/// A subsystem as it is now.
#[derive(Debug, Clone)]
pub struct SubsystemView {
    pub nqn: String,
    pub kind: SubsystemKind,
    pub serial_number: String,
    pub model_number: String,
    pub allow_any_host: bool,
    /// The allow list, in the order in which hosts were added.
    pub hosts: Vec<String>,
    pub max_namespaces: u32,
    pub min_cntlid: u16,
    pub max_cntlid: u16,
    pub ana_reporting: bool,
    pub listeners: Vec<SocketAddr>,
    /// By NSID.
    pub namespaces: Vec<NamespaceView>,
}

/// Where else hosts may ask for subsystems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    pub addr: SocketAddr,
    /// What is there: a discovery service, when it is the well-known NQN.
    pub nqn: String,
    /// Whether it is only reached by a secure channel.
    pub secure_channel: bool,
}

/// How one listener reaches a subsystem's namespaces.
#[derive(Debug, Clone)]
pub struct ListenerView {
    pub addr: SocketAddr,
    /// The state of each ANA group from 1 on; empty where that is not reported.
    pub ana_states: Vec<AnaState>,
}

/// A namespace as it is now.
#[derive(Debug, Clone)]
pub struct NamespaceView {
    pub nsid: u32,
    pub bdev_name: String,
    pub uuid: Uuid,
    pub nguid: [u8; 16],
    pub eui64: Option<[u8; 8]>,
    pub block_size: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    pub read_only: bool,
    /// Its ANA group.
    pub ana_group: u32,
    /// Flushes that its backend has done for its hosts; hosts that ask at the same time share one.
    pub flushes: u64,
}

/// A controller that a host is connected to.
#[derive(Debug, Clone)]
pub struct ControllerView {
    pub cntlid: u16,
    pub hostnqn: String,
    pub hostid: Uuid,
    /// Keep Alive Timeout in milliseconds, 0 if none.
    pub keep_alive_ms: u32,
    /// CC.EN and CSTS.RDY are set.
    pub enabled: bool,
    pub io_queues: usize,
}

/// A queue of a controller: one connection.
#[derive(Debug, Clone)]
pub struct QueueView {
    pub cntlid: u16,
    pub qid: u16,
    pub hostnqn: String,
    /// Entries.
    pub depth: u32,
    /// The reactor it lives on.
    pub reactor: u16,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}
