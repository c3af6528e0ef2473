//! How a subsystem changes.
//!
//! What is added is made in the target first, which judges it, and taken back when its record cannot be written.
//! What is taken away is struck from the records first: whatever fails or crashes after that, it does not come
//! back, and asking once more finishes the work. A change is answered when its records are durable, so an import finds each
//! subsystem as it was last answered for.
//!
//! All changes go through one lock: two half-done changes of one subsystem must not meet. Hosts that have to go may
//! take their time; that is waited for, as [`Leaving`], after the lock was given back.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use super::exports::{Addition, ChangeError, NamespaceRecord, Record, bytes_of_hex};
use super::lookup::pool_error;
use crate::nvme::nqn::DISCOVERY;
use crate::target::{AnaState, NamespaceSpec, SubsystemSpec, TargetError};
use std::future::{poll_fn, ready};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;

/// Where records lie in a pool's catalog; the NQN follows.
pub(super) const KEY_PREFIX: &str = "subsystem/";

/// Something that was taken out of the target, and whose users are still leaving.
#[must_use = "nobody waits for those who leave"]
pub struct Leaving(Pin<Box<dyn Future<Output = Result<(), TargetError>>>>);

impl Leaving {
    /// Begins `work` at once, up to where it has to wait. What is gone already needs no work.
    pub(super) async fn begin(work: impl Future<Output = Result<(), TargetError>> + 'static) -> Leaving {
        let mut work = Box::pin(async move {
            match work.await {
                Err(error) if error.is_not_found() => Ok(()),
                done => done,
            }
        });
        match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            Poll::Ready(done) => Leaving(Box::pin(ready(done))),
            Poll::Pending => Leaving(work),
        }
    }

    /// Waits until they have left.
    pub async fn end(self) -> Result<(), ChangeError> {
        Ok(self.0.await?)
    }
}

/// Each is called under [`Exports::lock`](super::exports::Exports::lock).
impl Daemon {
    /// Creates a subsystem.
    pub(super) fn create_subsystem(&self, spec: SubsystemSpec) -> Result<(), ChangeError> {
        let record = Record::new(&spec);
        match self.target.create_subsystem(spec) {
            Err(TargetError::SubsystemExists { nqn }) if self.exports.get(&nqn).is_none() => {
                let text = format!("subsystem {nqn} is being deleted, and hosts are still leaving it");
                Err(RpcError::refused(libc::EBUSY, text).with("field", "nqn").into())
            }
            made => {
                made?;
                self.exports.set(record);
                Ok(())
            }
        }
    }

    /// Deletes a subsystem and its records.
    pub(super) async fn delete_subsystem(&self, nqn: &str) -> Result<Leaving, ChangeError> {
        if nqn == DISCOVERY {
            return Err(TargetError::ReservedNqn.into());
        }
        let record = self.record(nqn)?;
        self.record_deletion(&record).await?;
        for pool in record.homes {
            self.write_record(&pool, nqn, None).await?;
        }
        self.exports.forget(nqn);
        let (target, nqn) = (self.target.clone(), nqn.to_owned());
        Ok(Leaving::begin(async move { target.delete_subsystem(&nqn).await }).await)
    }

    /// Adds a namespace and gives its NSID.
    pub(super) async fn add_namespace(&self, nqn: &str, addition: Addition) -> Result<u32, ChangeError> {
        let mut changed = self.record(nqn)?;
        let mut spec = NamespaceSpec::new(addition.backend, addition.bdev_name);
        spec.nsid = addition.nsid;
        spec.uuid = addition.uuid;
        spec.nguid = addition.nguid.as_deref().and_then(bytes_of_hex);
        spec.eui64 = addition.eui64.as_deref().and_then(bytes_of_hex);
        spec.block_size = addition.block_size.unwrap_or(spec.block_size);
        spec.read_only = addition.read_only;
        spec.ana_group = addition.anagrpid;
        let block_size = spec.block_size;
        let nsid = self.target.add_namespace(nqn, spec)?;
        changed.homes.extend(addition.place.pool().map(str::to_owned));
        changed.namespaces.push(NamespaceRecord {
            nsid,
            place: addition.place,
            uuid: addition.uuid,
            nguid: addition.nguid,
            eui64: addition.eui64,
            block_size,
            read_only: addition.read_only,
            anagrpid: addition.anagrpid,
        });
        changed.namespaces.sort_by_key(|namespace| namespace.nsid);
        if let Err(error) = self.keep(changed).await {
            let _ = self.target.remove_namespace(nqn, nsid).await;
            return Err(error);
        }
        Ok(nsid)
    }

    /// Removes a namespace, also one that could not be brought back.
    pub(super) async fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<Leaving, ChangeError> {
        let mut record = self.record(nqn)?;
        let Record { namespaces, unresolved, .. } = &mut record;
        let list = if namespaces.iter().any(|known| known.nsid == nsid) { namespaces } else { unresolved };
        let before = list.len();
        list.retain(|known| known.nsid != nsid);
        if list.len() == before {
            return Err(TargetError::NoNamespace { nsid, nqn: nqn.to_owned() }.into());
        }
        self.keep(record).await?;
        let (target, nqn) = (self.target.clone(), nqn.to_owned());
        Ok(Leaving::begin(async move { target.remove_namespace(&nqn, nsid).await }).await)
    }

    /// Starts to listen, also where that is recorded but could not be done so far.
    pub(super) async fn add_listener(&self, nqn: &str, address: SocketAddr) -> Result<(), ChangeError> {
        self.add_listener_in(nqn, address, None).await
    }

    /// The same, with what hosts are to find there: how it reaches all namespaces.
    pub(super) async fn add_listener_in(
        &self,
        nqn: &str,
        address: SocketAddr,
        state: Option<AnaState>,
    ) -> Result<(), ChangeError> {
        if nqn == DISCOVERY {
            return self.add_discovery_listener(address).await;
        }
        let mut record = self.record(nqn)?;
        let is_known = record.listeners.contains(&address);
        if let Some(state) = state.filter(|_| !is_known) {
            // Optimized is what all are where nothing is said of it.
            if state != AnaState::Optimized || record.ana_reporting {
                self.target.prepare_ana_state(nqn, address, None, state)?;
                record.set_access(address, None, state.name());
            }
        }
        if let Err(error) = self.target.add_listener(nqn, address).await {
            if !is_known && !matches!(error, TargetError::ListenerExists { .. }) {
                // It forgets what was prepared.
                let _ = self.target.remove_listener(nqn, address).await;
            }
            return Err(error.into());
        }
        if is_known {
            return Ok(());
        }
        record.listeners.push(address);
        if let Err(error) = self.keep(record).await {
            let _ = self.target.remove_listener(nqn, address).await;
            return Err(error);
        }
        Ok(())
    }

    /// Changes how an address reaches an ANA group, or all of them.
    pub(super) async fn set_ana_state(
        &self,
        nqn: &str,
        address: SocketAddr,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<Leaving, ChangeError> {
        if nqn == DISCOVERY {
            return Err(TargetError::ReservedNqn.into());
        }
        let mut record = self.record(nqn)?;
        if !record.listeners.contains(&address) {
            return Err(TargetError::NoListener { addr: address, nqn: nqn.to_owned() }.into());
        }
        self.target.check_ana_group(nqn, group)?;
        // First: a way that is closed must not be open after a crash.
        record.set_access(address, group, state.name());
        self.keep(record).await?;
        let (target, nqn) = (self.target.clone(), nqn.to_owned());
        let changed = async move {
            match target.set_ana_state(&nqn, address, group, state).await {
                // Recorded, but it could not be opened so far.
                Err(TargetError::NoListener { .. }) => target.prepare_ana_state(&nqn, address, group, state),
                changed => changed,
            }
        };
        Ok(Leaving::begin(changed).await)
    }

    /// Stops to listen.
    pub(super) async fn remove_listener(
        &self,
        nqn: &str,
        address: SocketAddr,
    ) -> Result<Leaving, ChangeError> {
        if nqn == DISCOVERY {
            return self.remove_discovery_listener(address).await;
        }
        let mut record = self.record(nqn)?;
        let Some(at) = record.listeners.iter().position(|known| *known == address) else {
            return Err(TargetError::NoListener { addr: address, nqn: nqn.to_owned() }.into());
        };
        record.listeners.remove(at);
        record.access.retain(|known| known.address != address);
        self.keep(record).await?;
        let (target, nqn) = (self.target.clone(), nqn.to_owned());
        Ok(Leaving::begin(async move { target.remove_listener(&nqn, address).await }).await)
    }

    /// Allows a host.
    pub(super) async fn add_host(&self, nqn: &str, host: &str) -> Result<(), ChangeError> {
        let mut record = self.record(nqn)?;
        self.target.add_host(nqn, host)?;
        record.hosts.push(host.to_owned());
        if let Err(error) = self.keep(record).await {
            let _ = self.target.remove_host(nqn, host).await;
            return Err(error);
        }
        Ok(())
    }

    /// Disallows a host and disconnects it.
    pub(super) async fn remove_host(&self, nqn: &str, host: &str) -> Result<Leaving, ChangeError> {
        let mut record = self.record(nqn)?;
        let Some(at) = record.hosts.iter().position(|known| known == host) else {
            return Err(TargetError::NoHost { host: host.to_owned(), nqn: nqn.to_owned() }.into());
        };
        record.hosts.remove(at);
        self.keep(record).await?;
        let (target, nqn, host) = (self.target.clone(), nqn.to_owned(), host.to_owned());
        Ok(Leaving::begin(async move { target.remove_host(&nqn, &host).await }).await)
    }

    /// Allows any host, or only those in the list.
    pub(super) async fn allow_any_host(&self, nqn: &str, allow: bool) -> Result<Leaving, ChangeError> {
        let mut record = self.record(nqn)?;
        record.allow_any_host = allow;
        self.keep(record).await?;
        let (target, nqn) = (self.target.clone(), nqn.to_owned());
        Ok(Leaving::begin(async move { target.allow_any_host(&nqn, allow).await }).await)
    }

    pub(super) fn record(&self, nqn: &str) -> Result<Record, TargetError> {
        self.exports.get(nqn).ok_or_else(|| TargetError::NoSubsystem { nqn: nqn.to_owned() })
    }

    /// Makes a changed record durable in every pool it lies in, or in none, then the truth here.
    pub(super) async fn keep(&self, mut record: Record) -> Result<(), ChangeError> {
        if record.generation > 0 || !record.homes.is_empty() {
            record.generation += 1;
        }
        let homes: Vec<_> = record.homes.iter().filter_map(|name| self.pools.get(name).ok()).collect();
        record.pools.extend(homes.iter().map(|home| home.uuid()));
        drop(homes);
        for (at, pool) in record.homes.iter().enumerate() {
            let Err(error) = self.write_record(pool, &record.nqn, Some(&record)).await else { continue };
            let before = self.exports.get(&record.nqn);
            for pool in record.homes.iter().take(at) {
                let before = before.as_ref().filter(|before| before.homes.contains(pool));
                if let Err(error) = self.write_record(pool, &record.nqn, before).await {
                    tracing::error!(nqn = record.nqn, pool, ?error, "a record cannot be taken back");
                }
            }
            return Err(error);
        }
        self.exports.set(record);
        Ok(())
    }

    pub(super) async fn write_record(
        &self,
        pool: &str,
        nqn: &str,
        record: Option<&Record>,
    ) -> Result<(), ChangeError> {
        // A pool that was exported meanwhile has no exports left that could change.
        let Ok(home) = self.pools.get(pool) else { return Ok(()) };
        let value = record.map(|record| serde_json::to_value(record.for_pool(pool))).transpose();
        let value = value.map_err(|error| RpcError::refused(libc::EIO, error.to_string()))?;
        home.config_put(&format!("{KEY_PREFIX}{nqn}"), value).await.map_err(pool_error)?;
        Ok(())
    }
}
