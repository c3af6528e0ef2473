//! The daemon: everything the methods work on, brought up from a configuration and taken down cleanly.
//!
//! The order at the start: reactors, devices, all pools, all recorded exports, the subsystems of the
//! configuration, and only then the listeners, so that a host that connects finds everything that was there
//! before. The order at the end is the reverse.
#![forbid(unsafe_code)]

use super::devices::{Devices, OpenDevice, Opening, Origin};
use super::error::RpcError;
use super::exports::{ChangeError, Exports};
use super::methods::nvmf::target_error;
use crate::config::{Config, Poll, PoolEntry, SubsystemEntry};
use crate::device::OpenOptions;
use crate::memory::{self, ArenaConfig};
use crate::pool::{PoolManager, PoolOptions};
use crate::reactor::{PollMode, ReactorConfig, ReactorError, Reactors};
use crate::target::{SubsystemSpec, Target};
use crate::units::format_size;
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Instant;
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
    #[error("{what}: {}", error.message)]
    Entry {
        /// Which entry.
        what: String,
        /// Why it was refused.
        error: RpcError,
    },
}

/// The running appliance, seen from the control thread.
pub struct Daemon {
    /// Where exports listen unless told otherwise.
    pub(super) listen: SocketAddr,
    pub(super) target: Target,
    pub(super) exports: Exports,
    /// Whether a client of SPDK's has "created" the transport, which it may do once.
    pub(super) transport_created: Cell<bool>,
    pub(super) pools: PoolManager,
    pub(super) devices: Devices,
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
        let daemon = Daemon {
            listen: config.target.listen,
            target: Target::new(reactors.handles().to_vec()),
            exports: Exports::default(),
            transport_created: Cell::new(false),
            pools: PoolManager::new(reactors.handles().to_vec(), config.memory.page_cache),
            devices: Devices::default(),
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
        let mut listeners = Vec::new();
        for entry in &config.pool {
            let up = self.bring_up(entry).await;
            up.map_err(|error| StartError::Entry { what: format!("[[pool]] {}", entry.name), error })?;
            listeners.extend(self.restore_exports(&entry.name).await);
        }
        let refused = |nqn: &str, error| StartError::Entry { what: format!("[[subsystem]] {nqn}"), error };
        for entry in &config.subsystem {
            let made = self.make_subsystem(entry).await;
            listeners.extend(made.map_err(|error| match error {
                ChangeError::Target(error) => refused(&entry.nqn, target_error(&error)),
                ChangeError::Refused(error) => refused(&entry.nqn, error),
            })?);
        }
        // All at once, and last: a host that finds a socket open finds every subsystem that was there before.
        for (nqn, error) in self.target.add_listeners(listeners).await {
            if config.subsystem.iter().any(|entry| entry.nqn == nqn) {
                return Err(refused(&nqn, target_error(&error)));
            }
            tracing::error!(nqn, %error, "a recorded listener cannot be opened");
        }
        Ok(())
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

    /// Makes a subsystem of the configuration and returns where it is to listen.
    async fn make_subsystem(&self, entry: &SubsystemEntry) -> Result<Vec<(String, SocketAddr)>, ChangeError> {
        let mut spec = SubsystemSpec::new(&entry.nqn);
        spec.serial_number = entry.serial_number.clone().unwrap_or_default();
        spec.allow_any_host = entry.hosts.is_empty();
        self.create_subsystem(spec)?;
        for host in &entry.hosts {
            self.add_host(&entry.nqn, host).await?;
        }
        for device in &entry.devices {
            let missing =
                || RpcError::field("devices", format!("device {device} is not open, or part of a pool"));
            let mut backend = self.backend(device).await.ok_or_else(missing)?;
            // The same after a restart: a host that reconnects must not find another disk in the old one's place.
            let identity = format!("rimrock:{}/{device}", entry.nqn);
            backend.uuid = Some(Uuid::new_v5(&Uuid::NAMESPACE_URL, identity.as_bytes()));
            self.add_namespace(&entry.nqn, backend).await?;
        }
        let listen = match entry.listen.is_empty() {
            true => vec![self.listen],
            false => entry.listen.clone(),
        };
        let mut record = self.record(&entry.nqn)?;
        for address in listen {
            if !record.listeners.contains(&address) {
                record.listeners.push(address);
            }
        }
        let listeners = record.listeners.iter().map(|address| (entry.nqn.clone(), *address)).collect();
        self.keep(record).await?;
        Ok(listeners)
    }

    /// Takes everything down cleanly: hosts are disconnected and pools exported. Devices and reactors go with the
    /// daemon itself.
    pub async fn stop(&self) {
        self.target.shutdown().await;
        for subsystem in self.exports.all() {
            if let Err(error) = self.target.delete_subsystem(&subsystem.nqn).await {
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
