//! The daemon: everything the methods work on, brought up from a configuration and taken down cleanly.
#![forbid(unsafe_code)]

use super::devices::{Devices, OpenDevice, Opening, Origin};
use super::error::RpcError;
use crate::config::{Config, Poll};
use crate::device::OpenOptions;
use crate::reactor::{PollMode, ReactorConfig, ReactorError, Reactors};
use std::net::SocketAddr;

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The polling threads.
    #[error("{0}")]
    Reactors(#[from] ReactorError),
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
    pub(super) devices: Devices,
    // Last: everything above holds handles to it.
    reactors: Reactors,
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
        let reactors = Reactors::start(reactor)?;
        let daemon = Daemon { listen: config.target.listen, devices: Devices::default(), reactors };
        for entry in &config.device {
            let opening = Opening {
                name: Some(entry.name.clone()),
                uri: entry.uri.clone(),
                options: OpenOptions::default(),
                uuid: None,
                origin: Origin::Named,
                field: "uri",
            };
            daemon
                .devices
                .open(opening)
                .await
                .map_err(|error| StartError::Entry { what: format!("[[device]] {}", entry.name), error })?;
        }
        Ok(daemon)
    }

    /// Takes everything down cleanly.
    pub async fn stop(self) {
        self.reactors.shutdown();
    }

    /// What uses a device, in words.
    pub(super) fn user_of(&self, device: &OpenDevice) -> Option<String> {
        device.pool.borrow().as_ref().map(|pool| format!("pool {pool}"))
    }
}
