//! What the operator tells the discovery service: where else hosts may ask, and by which addresses it is named itself.
//!
//! It is kept in every pool's catalog, as the limits of the transport are: it belongs to no pool, and the newest of the records
//! counts, unless it was set in this life of the daemon.
#![forbid(unsafe_code)]

use super::Daemon;
use super::changes::Leaving;
use super::error::RpcError;
use super::exports::ChangeError;
use super::lookup::pool_error;
use crate::nvme::nqn::DISCOVERY;
use crate::pool::Pool;
use crate::target::{Referral, TargetError};
use serde::{Deserialize, Serialize};
use std::future::ready;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

const KEY: &str = "discovery";

/// A referral as it was added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReferralRecord {
    address: SocketAddr,
    subnqn: String,
    secure_channel: bool,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiscoveryRecord {
    referrals: Vec<ReferralRecord>,
    /// Addresses that were given to the discovery service itself.
    listeners: Vec<SocketAddr>,
    /// When it was set, milliseconds since 1970; 0 is never.
    set: u64,
    /// It was set in this life of the daemon.
    #[serde(skip)]
    is_ours: bool,
}

impl DiscoveryRecord {
    fn is_same(&self, other: &DiscoveryRecord) -> bool {
        (&self.referrals, &self.listeners, self.set) == (&other.referrals, &other.listeners, other.set)
    }
}

impl Daemon {
    /// Tells hosts of another place to ask. Called under [`Exports::lock`](super::exports::Exports::lock), as all here.
    pub(super) async fn add_referral(&self, referral: Referral) -> Result<(), ChangeError> {
        let known = self.target.referrals();
        self.target.add_referral(referral)?;
        if let Err(error) = self.keep_discovery(self.discovery_listeners()).await {
            self.set_referrals(&known);
            return Err(error);
        }
        Ok(())
    }

    /// Tells hosts of it no more. False if there is no such referral.
    pub(super) async fn remove_referral(
        &self,
        address: SocketAddr,
        subnqn: &str,
    ) -> Result<bool, ChangeError> {
        let known = self.target.referrals();
        if !self.target.remove_referral(address, subnqn) {
            return Ok(false);
        }
        if let Err(error) = self.keep_discovery(self.discovery_listeners()).await {
            self.set_referrals(&known);
            return Err(error);
        }
        Ok(true)
    }

    /// Makes the target's referrals what they were, in their order.
    fn set_referrals(&self, wanted: &[Referral]) {
        for known in self.target.referrals() {
            self.target.remove_referral(known.addr, &known.nqn);
        }
        for referral in wanted {
            if let Err(error) = self.target.add_referral(referral.clone()) {
                tracing::error!(address = %referral.addr, %error, "a referral is left out");
            }
        }
    }

    /// Gives the discovery service an address of its own.
    pub(super) async fn add_discovery_listener(&self, address: SocketAddr) -> Result<(), ChangeError> {
        self.target.add_listener(DISCOVERY, address).await?;
        let mut listeners = self.discovery_listeners();
        if listeners.contains(&address) {
            return Ok(());
        }
        listeners.push(address);
        if let Err(error) = self.keep_discovery(listeners).await {
            let _ = self.target.remove_listener(DISCOVERY, address).await;
            return Err(error);
        }
        Ok(())
    }

    /// Takes it away again.
    pub(super) async fn remove_discovery_listener(
        &self,
        address: SocketAddr,
    ) -> Result<Leaving, ChangeError> {
        let mut listeners = self.discovery_listeners();
        let Some(at) = listeners.iter().position(|known| *known == address) else {
            return Err(TargetError::NoListener { addr: address, nqn: DISCOVERY.to_owned() }.into());
        };
        listeners.remove(at);
        self.keep_discovery(listeners).await?;
        match self.target.remove_listener(DISCOVERY, address).await {
            // Recorded, but it could not be opened so far.
            Ok(()) | Err(TargetError::NoListener { .. }) => Ok(Leaving::begin(ready(Ok(()))).await),
            Err(error) => Err(error.into()),
        }
    }

    /// The addresses that were given to the discovery service.
    pub(super) fn discovery_listeners(&self) -> Vec<SocketAddr> {
        self.discovery.borrow().listeners.clone()
    }

    /// Those on which nothing listens.
    pub(super) fn closed_discovery_listeners(&self) -> Vec<(String, SocketAddr)> {
        let open = self.target.subsystem(DISCOVERY).map(|view| view.listeners).unwrap_or_default();
        let closed = self.discovery_listeners().into_iter().filter(|address| !open.contains(address));
        closed.map(|address| (DISCOVERY.to_owned(), address)).collect()
    }

    /// Records what the target has now, with these listeners, in every pool, or leaves the records as they were.
    async fn keep_discovery(&self, listeners: Vec<SocketAddr>) -> Result<(), ChangeError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let referrals = self.target.referrals().into_iter().map(|referral| ReferralRecord {
            address: referral.addr,
            subnqn: referral.nqn,
            secure_channel: referral.secure_channel,
        });
        let before = self.discovery.borrow().clone();
        let record = DiscoveryRecord {
            referrals: referrals.collect(),
            listeners,
            set: u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(before.set + 1),
            is_ours: true,
        };
        let pools = self.pools.list();
        for (at, pool) in pools.iter().enumerate() {
            let Err(error) = write(pool, &record).await else { continue };
            for pool in &pools[..at] {
                if let Err(error) = write(pool, &before).await {
                    tracing::error!(pool = pool.name(), ?error, "a record of discovery cannot be taken back");
                }
            }
            return Err(error.into());
        }
        self.discovery.replace(record);
        Ok(())
    }

    /// Brings a pool's record and what is in force in line. Its listeners are opened with all others.
    pub(super) async fn agree_on_discovery(&self, pool: &Pool) {
        let stored = match pool.config_list(KEY).await {
            Ok(stored) => stored.into_iter().find(|(key, _)| key == KEY).map(|(_, value)| value),
            Err(error) => {
                return tracing::error!(pool = pool.name(), %error, "the record of discovery cannot be read");
            }
        };
        let stored = stored.and_then(|value| serde_json::from_value::<DiscoveryRecord>(value).ok());
        let stored = stored.unwrap_or_default();
        let ours = self.discovery.borrow().clone();
        if stored.is_same(&ours) {
            return;
        }
        if !ours.is_ours && stored.set > ours.set {
            let referrals: Vec<Referral> = stored
                .referrals
                .iter()
                .map(|known| Referral {
                    addr: known.address,
                    nqn: known.subnqn.clone(),
                    secure_channel: known.secure_channel,
                })
                .collect();
            self.set_referrals(&referrals);
            self.discovery.replace(stored);
        } else if let Err(error) = write(pool, &ours).await {
            tracing::error!(pool = pool.name(), ?error, "discovery cannot be recorded");
        }
    }
}

async fn write(pool: &Pool, record: &DiscoveryRecord) -> Result<(), RpcError> {
    let value =
        serde_json::to_value(record).map_err(|error| RpcError::refused(libc::EIO, error.to_string()))?;
    pool.config_put(KEY, Some(value)).await.map_err(pool_error)
}
