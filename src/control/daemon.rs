//! The daemon: everything the methods work on, brought up from a configuration and taken down cleanly.
//!
//! The order at the start: reactors, devices, all pools, all recorded exports, the subsystems of the configuration
//! (which give way where a record already has what they ask for), and only then the listeners, so that a host that connects finds everything that was there
//! before. The order at the end is the reverse.
#![forbid(unsafe_code)]

use super::devices::{Devices, OpenDevice, Opening, Origin};
use super::discovery::DiscoveryRecord;
use super::error::RpcError;
use super::events::Events;
use super::exports::{ChangeError, Exports};
use super::methods::nvmf::target_error;
use super::transfers::Transfers;
use super::transport::TransportRecord;
use crate::config::{Config, Poll, PoolEntry, SubsystemEntry};
use crate::device::OpenOptions;
use crate::memory::{self, ArenaConfig};
use crate::pool::{PoolManager, PoolOptions};
use crate::reactor::{PollMode, ReactorConfig, ReactorError, Reactors};
use crate::target::{SubsystemSpec, Target, TargetError};
use crate::units::format_size;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Mutex;
use uuid::Uuid;

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The polling threads.
    #[error("{0}")]
    Reactors(#[from] ReactorError),
    /// Data in flight would wait for memory for ever.
    #[error(
        "memory.buffers is {}, too little for this many reactors: give it {} or more",
        format_size(*given),
        format_size(*floor)
    )]
    Buffers {
        /// Bytes.
        given: u64,
        /// Bytes.
        floor: u64,
    },
    /// Something of the configuration file.
    #[error("{what}: {}{}", error.message, hint_of(error))]
    Entry {
        /// Which entry.
        what: String,
        /// Why it was refused.
        error: RpcError,
    },
}

/// What the operator can do next, in brackets.
fn hint_of(error: &RpcError) -> String {
    let hint = error.data.as_ref().and_then(|data| data["hint"].as_str());
    hint.map(|hint| format!(" ({hint})")).unwrap_or_default()
}

/// The running appliance, seen from the control thread.
pub struct Daemon {
    /// Where exports listen unless told otherwise.
    pub(super) listen: SocketAddr,
    /// Discovery is announced by multicast DNS.
    pub(super) advertises: bool,
    pub(super) target: Target,
    pub(super) exports: Exports,
    /// Whether a client of SPDK's has "created" the transport, which it may do once.
    pub(super) transport_created: Cell<bool>,
    /// The limits of the transport as they are recorded, if they ever were set.
    pub(super) transport: RefCell<Option<TransportRecord>>,
    /// What discovery is told by the operator.
    pub(super) discovery: RefCell<DiscoveryRecord>,
    pub(super) pools: PoolManager,
    pub(super) events: Arc<Events>,
    /// Held while a pool is created, imported, exported or destroyed.
    pub(super) pool_changes: Mutex<()>,
    pub(super) devices: Devices,
    pub(super) transfers: Transfers,
    pub(super) started: Instant,
    /// Dropped last, since everything above holds handles to it.
    pub(super) reactors: Reactors,
}

impl Daemon {
    /// Brings up what the configuration names.
    pub async fn start(config: &Config) -> Result<Daemon, StartError> {
        let mut reactor = ReactorConfig { cores: config.reactor.cores.clone(), ..ReactorConfig::default() };
        reactor.poll = match config.reactor.poll {
            Poll::Adaptive => PollMode::Adaptive,
            Poll::Busy => PollMode::Busy,
        };
        if let Some(spin_us) = config.reactor.spin_us {
            reactor.spin_us = spin_us;
        }
        let budget = usize::try_from(config.memory.buffers).unwrap_or(usize::MAX);
        let reactors = Reactors::start(reactor)?;
        // The control thread uses buffers too.
        let threads = reactors.handles().len() + 1;
        let floor = memory::budget_floor(threads);
        if budget < floor {
            return Err(StartError::Buffers { given: budget as u64, floor: floor as u64 });
        }
        memory::configure(&ArenaConfig { budget, threads, hugetlb: config.memory.hugepages });
        let events = Arc::<Events>::default();
        let kept = Arc::clone(&events);
        let sink = Arc::new(move |event| kept.add(&event));
        let daemon = Daemon {
            listen: config.target.listen,
            advertises: config.discovery.mdns,
            target: Target::new(reactors.handles().to_vec()),
            exports: Exports::default(),
            transport_created: Cell::new(false),
            transport: RefCell::default(),
            discovery: RefCell::default(),
            pools: PoolManager::new(reactors.handles().to_vec(), config.memory.page_cache).with_events(sink),
            events,
            pool_changes: Mutex::default(),
            devices: Devices::default(),
            transfers: Transfers::default(),
            started: Instant::now(),
            reactors,
        };
        match daemon.configure(config).await {
            Ok(()) => Ok(daemon),
            Err(error) => {
                daemon.stop().await;
                Err(error)
            }
        }
    }

    async fn configure(&self, config: &Config) -> Result<(), StartError> {
        for entry in &config.device {
            let opening = Opening {
                name: Some(entry.name.clone()),
                uri: entry.uri.clone(),
                options: OpenOptions::default(),
                uuid: None,
                origin: Origin::Named,
                field: "uri",
            };
            let opened = self.devices.open(opening).await.map(drop);
            opened
                .map_err(|error| StartError::Entry { what: format!("[[device]] {}", entry.name), error })?;
        }
        for entry in &config.pool {
            let up = self.bring_up(entry).await;
            up.map_err(|error| StartError::Entry { what: format!("[[pool]] {}", entry.name), error })?;
        }
        // Of all pools before any: what is deleted must not come back, and the newest limits count.
        for pool in self.pools.list() {
            self.agree_on_transport(&pool).await;
            self.agree_on_discovery(&pool).await;
            self.read_deletions(&pool).await;
        }
        for pool in self.pools.list() {
            self.restore_exports(pool.name()).await;
        }
        let refused = |nqn: &str, error| StartError::Entry { what: format!("[[subsystem]] {nqn}"), error };
        for entry in &config.subsystem {
            let made = self.make_subsystem(entry).await;
            made.map_err(|error| match error {
                ChangeError::Target(error) => refused(&entry.nqn, target_error(&error)),
                ChangeError::Refused(error) => refused(&entry.nqn, error),
            })?;
        }
        // All at once, and last: a host that finds a socket open finds every subsystem that was there before. Those of
        // the configuration first, so that none of them fails of an address that was merely recorded.
        let (mut listeners, recorded): (Vec<_>, Vec<_>) =
            self.closed_listeners().into_iter().partition(|(nqn, address)| {
                config.subsystem.iter().any(|e| e.nqn == *nqn && self.is_for(e, address))
            });
        listeners.extend(recorded);
        for (nqn, error) in self.target.add_listeners(listeners).await {
            let configured = config.subsystem.iter().find(|entry| entry.nqn == nqn);
            if let (Some(entry), TargetError::Listen { addr, .. }) = (configured, &error)
                && self.is_for(entry, addr)
            {
                return Err(refused(&nqn, target_error(&error)));
            }
            tracing::error!(nqn, %error, "a recorded listener cannot be opened yet");
        }
        Ok(())
    }

    /// Where a subsystem of the configuration is to listen.
    fn addresses<'a>(&'a self, entry: &'a SubsystemEntry) -> &'a [SocketAddr] {
        match entry.listen.is_empty() {
            true => std::slice::from_ref(&self.listen),
            false => &entry.listen,
        }
    }

    fn is_for(&self, entry: &SubsystemEntry, address: &SocketAddr) -> bool {
        self.addresses(entry).contains(address)
    }

    /// Imports a pool, or creates it where that is asked for and the devices hold none.
    async fn bring_up(&self, entry: &PoolEntry) -> Result<(), RpcError> {
        let info = match self.import_pool_quietly(&entry.devices).await {
            Err(error) if entry.create && error.code == -i64::from(libc::ENODEV) => {
                tracing::info!(pool = entry.name, "no pool is on the devices; creating it");
                self.create_pool(&entry.name, &entry.devices, PoolOptions::default()).await?
            }
            other => other?,
        };
        if info.name != entry.name {
            return Err(RpcError::refused(
                libc::EINVAL,
                format!("the devices hold a pool named {}", info.name),
            ));
        }
        tracing::info!(pool = info.name, volumes = info.volumes, snapshots = info.snapshots, "imported");
        Ok(())
    }

    /// Makes a subsystem of the configuration, or adds to the recorded one of its name what is missing there. What was
    /// recorded since the file was written may stand in the way of a part of it; the start does not fail of that.
    async fn make_subsystem(&self, entry: &SubsystemEntry) -> Result<(), ChangeError> {
        if self.exports.get(&entry.nqn).is_none() {
            let mut spec = SubsystemSpec::new(&entry.nqn);
            spec.serial_number = entry.serial_number.clone().unwrap_or_default();
            spec.allow_any_host = entry.hosts.is_empty();
            unless_taken(entry, self.create_subsystem(spec))?;
        }
        let Some(record) = self.exports.get(&entry.nqn) else { return Ok(()) };
        for host in entry.hosts.iter().filter(|host| !record.hosts.contains(host)) {
            self.add_host(&entry.nqn, host).await?;
        }
        for (device, nsid) in entry.devices.iter().zip(1..) {
            let missing =
                || RpcError::field("devices", format!("device {device} is not open, or part of a pool"));
            let mut backend = self.backend(device).await.ok_or_else(missing)?;
            backend.nsid = Some(nsid);
            // The same after a restart: a host that reconnects must not find another disk in the old one's place.
            let identity = format!("rimrock:{}/{device}", entry.nqn);
            backend.uuid = Some(Uuid::new_v5(&Uuid::NAMESPACE_URL, identity.as_bytes()));
            unless_taken(entry, self.add_namespace(&entry.nqn, backend).await.map(drop))?;
        }
        let mut record = self.record(&entry.nqn)?;
        let known = record.listeners.len();
        let new = self.addresses(entry).iter().filter(|address| !record.listeners.contains(address));
        record.listeners.extend(new.copied().collect::<Vec<SocketAddr>>());
        match record.listeners.len() > known {
            true => self.keep(record).await,
            false => Ok(()),
        }
    }

    /// Takes everything down cleanly: hosts are disconnected and pools exported. Devices and reactors go with the
    /// daemon itself.
    pub async fn stop(&self) {
        self.end_transfers(None).await;
        self.target.shutdown().await;
        for subsystem in self.exports.all() {
            if let Err(error) = self.target.withdraw_subsystem(&subsystem.nqn).await {
                tracing::warn!(nqn = subsystem.nqn, %error, "a subsystem did not go in peace");
            }
        }
        for pool in self.pools.list() {
            match self.pools.shut(&pool).await {
                Ok(()) => tracing::info!(pool = pool.name(), "exported"),
                Err(error) => {
                    tracing::error!(pool = pool.name(), %error, "the pool was not exported cleanly")
                }
            }
        }
    }

    /// What uses a device, in words.
    pub(super) fn user_of(&self, device: &OpenDevice) -> Option<String> {
        if let Some(pool) = device.pool.borrow().as_ref() {
            return Some(format!("pool {pool}"));
        }
        self.exports.of_device(&device.name).first().map(|(nqn, nsid)| format!("namespace {nsid} of {nqn}"))
    }
}

/// A part of a configured subsystem that something recorded stands in the way of is left out, and that is said.
fn unless_taken(entry: &SubsystemEntry, made: Result<(), ChangeError>) -> Result<(), ChangeError> {
    match made {
        Err(ChangeError::Target(error)) if error.is_conflict() => {
            tracing::error!(nqn = entry.nqn, %error, "a part of a configured subsystem is left out");
            Ok(())
        }
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_to_go_on_is_refused_with_what_would_do() {
        let mut config = Config::default();
        config.reactor.cores = vec![0];
        config.memory.buffers = 1 << 20;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let Err(error) = runtime.block_on(Daemon::start(&config)) else { panic!("1 MiB is not enough") };
        assert!(error.to_string().contains("40 MiB"), "{error}");
        config.memory.buffers = 40 << 20;
        assert!(runtime.block_on(Daemon::start(&config)).is_ok());
    }
}
