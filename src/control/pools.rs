//! Operations on whole pools: create, import, export, destroy.
//!
//! They are made one at a time, so that a call that is repeated while the first is still under way finds what the
//! first made. A pool's devices are [claimed](super::devices::Claim) before anything is awaited and are free again
//! as soon as the pool is gone, however the call ends.
#![forbid(unsafe_code)]

use super::Daemon;
use super::devices::{Claim, OpenDevice, Opening, Origin};
use super::error::RpcError;
use super::lookup::pool_error;
use super::methods::device::named;
use super::signatures;
use crate::device::OpenOptions;
use crate::pool::{Pool, PoolInfo, PoolOptions};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// How long exporting a pool waits for an operation on it, such as a resize, before it is refused.
const OPERATION_PATIENCE: Duration = Duration::from_secs(2);

impl Daemon {
    /// Creates a pool, or finds the one that an earlier call like this made.
    pub(crate) async fn create_pool(
        &self,
        name: &str,
        devices: &[String],
        options: PoolOptions,
    ) -> Result<PoolInfo, RpcError> {
        let _alone = self.pool_changes.lock().await;
        if let Some(existing) = self.same_pool(name, devices, &options).await? {
            return Ok(existing);
        }
        let claim = self.claim(devices).await?;
        if !options.force {
            for device in claim.held() {
                signatures::refuse_foreign(device).await?;
            }
        }
        let handles = claim.held().iter().map(|device| device.device.clone()).collect();
        let pool = self.pools.create(name, handles, options).await.map_err(pool_error)?;
        claim.keep(pool.name());
        self.agree_on_transport(&pool).await;
        pool.info().await.map_err(pool_error)
    }

    /// Imports a pool and opens what is exported from it; a pool that is up already is left as it is.
    /// Also gives what of its exports could not be brought back.
    pub(crate) async fn import_pool(&self, devices: &[String]) -> Result<(PoolInfo, Vec<String>), RpcError> {
        if devices.is_empty() {
            return Err(RpcError::field("devices", "must name at least one device"));
        }
        let _alone = self.pool_changes.lock().await;
        if let Some(pool) = self.pool_on(devices) {
            return Ok((pool.info().await.map_err(pool_error)?, Vec::new()));
        }
        let info = self.import_alone(devices).await?;
        let _changing = self.exports.lock().await;
        let warnings = self.restore_exports(&info.name).await;
        self.open_listeners().await;
        Ok((info, warnings))
    }

    /// Imports a pool and leaves its exports alone.
    pub(crate) async fn import_pool_quietly(&self, devices: &[String]) -> Result<PoolInfo, RpcError> {
        let _alone = self.pool_changes.lock().await;
        self.import_alone(devices).await
    }

    async fn import_alone(&self, devices: &[String]) -> Result<PoolInfo, RpcError> {
        let claim = self.claim(devices).await?;
        let handles = claim.held().iter().map(|device| device.device.clone()).collect();
        let pool = self.pools.import(handles).await.map_err(pool_error)?;
        claim.keep(pool.name());
        self.transfers.expect_strays();
        pool.info().await.map_err(pool_error)
    }

    /// Takes a pool and its exports down. Hosts that are connected are cut off only when that is asked for.
    pub(crate) async fn export_pool(&self, name: &str, force: bool) -> Result<(), RpcError> {
        let _alone = self.pool_changes.lock().await;
        let pool = self.pool_named(name)?;
        let (name, uuid) = (&*pool.name().to_owned(), pool.uuid());
        let idle = tokio::time::timeout(OPERATION_PATIENCE, pool.settle()).await;
        // A handle to the pool is one to its devices, which shall be free at the end.
        drop(pool);
        let busy = |_| RpcError::refused(libc::EBUSY, format!("an operation on pool {name} is under way"));
        idle.map_err(busy)?.map_err(pool_error)?;
        let leaving = {
            let _changing = self.exports.lock().await;
            match force {
                true => self.end_transfers(Some(name)).await,
                false => self.transfers.refuse_for(name)?,
            }
            if let (false, Some(nqn)) = (force, self.connected_subsystem(name)) {
                let text = format!("hosts are connected to {nqn} of pool {name}");
                return Err(
                    RpcError::refused(libc::EBUSY, text).hint("disconnect them first, or ask with force")
                );
            }
            self.withdraw_exports(name).await
        };
        for leaving in leaving {
            leaving
                .end()
                .await
                .unwrap_or_else(|error| tracing::warn!(pool = name, ?error, "an export did not go in peace"));
        }
        let ended = self.pools.export(name).await.map_err(pool_error);
        self.after_end(name, uuid).await;
        if ended.is_err() && self.is_open(uuid) {
            let _changing = self.exports.lock().await;
            self.restore_exports(name).await;
            self.open_listeners().await;
        }
        ended
    }

    /// Destroys a pool that nothing is exported from. A caller that holds a handle to the pool meanwhile is waited for:
    /// it is one to its devices.
    pub(crate) async fn destroy_pool(&self, name: &str) -> Result<(), RpcError> {
        let _alone = self.pool_changes.lock().await;
        let pool = self.pool_named(name)?;
        let (name, uuid) = (&*pool.name().to_owned(), pool.uuid());
        drop(pool);
        let _changing = self.exports.lock().await;
        self.transfers.refuse_for(name)?;
        if let Some((nqn, nsid)) = self.exports.of_pool(name).first() {
            return Err(RpcError::refused(
                libc::EBUSY,
                format!("pool {name} is exported, as namespace {nsid} of {nqn}"),
            )
            .hint("end its exports first: `rimrock volume unexport NAME`, or `rimrock rpc nvmf_delete_subsystem`"));
        }
        let ended = self.pools.destroy(name).await.map_err(pool_error);
        if ended.is_ok() {
            self.exports.forget_pool(uuid);
        }
        self.after_end(name, uuid).await;
        ended
    }

    fn is_open(&self, pool: Uuid) -> bool {
        self.pools.list().iter().any(|open| open.uuid() == pool)
    }

    /// Lets go of what belonged to a pool that is open no more, whether it ended well or not.
    async fn after_end(&self, name: &str, uuid: Uuid) {
        if self.is_open(uuid) {
            return;
        }
        self.forget_home(name);
        let devices = self.devices.of_pool(name);
        for device in &devices {
            self.devices.settle(device).await;
        }
        self.devices.set_pool(&devices, None);
        for device in devices {
            self.devices.close(device).await;
        }
    }

    /// Sets the devices aside that a pool command names by name or by URI; those given by URI are opened.
    async fn claim(&self, names: &[String]) -> Result<Claim<'_>, RpcError> {
        let mut claim = self.devices.claim();
        for name in names {
            let device = match self.devices.find(name) {
                Some(device) => device,
                None if name.contains(':') => self.device_by_uri(name).await?,
                None => named(self, name)?,
            };
            if claim.held().iter().any(|other| other.name == device.name) {
                return Err(RpcError::field("devices", format!("{name} is named twice")));
            }
            // Under the lock no namespace is just coming to use it.
            let _changing = self.exports.lock().await;
            if let Some(user) = self.user_of(&device) {
                let text = format!("device {name} is in use by {user}");
                return Err(RpcError::refused(libc::EBUSY, text).with("field", "devices"));
            }
            if self.devices.find(&device.name).is_none() {
                return Err(RpcError::refused(libc::ENODEV, format!("device {name} was just closed")));
            }
            claim.add(device);
        }
        Ok(claim)
    }

    async fn device_by_uri(&self, uri: &str) -> Result<Rc<OpenDevice>, RpcError> {
        if let Some(device) = self.by_uri(uri) {
            return Ok(device);
        }
        let opening = Opening {
            name: None,
            uri: uri.to_owned(),
            options: OpenOptions::default(),
            uuid: None,
            origin: Origin::Pool,
            field: "devices",
        };
        self.devices.open(opening).await
    }

    fn by_uri(&self, uri: &str) -> Option<Rc<OpenDevice>> {
        self.devices.all().into_iter().find(|device| device.uri == uri)
    }

    /// The open pool that has just these devices.
    fn pool_on(&self, names: &[String]) -> Option<Arc<Pool>> {
        let devices = names.iter().map(|name| self.devices.find(name).or_else(|| self.by_uri(name)));
        let devices: Vec<Rc<OpenDevice>> = devices.collect::<Option<_>>()?;
        let pool = devices.first()?.pool.borrow().clone()?;
        let own = self.devices.of_pool(&pool);
        let same = own.len() == names.len()
            && own.iter().all(|device| devices.iter().any(|named| Rc::ptr_eq(named, device)));
        self.pools.get(&pool).ok().filter(|_| same)
    }

    /// The pool of that name if it is what the call asks for; an error if it differs.
    async fn same_pool(
        &self,
        name: &str,
        devices: &[String],
        options: &PoolOptions,
    ) -> Result<Option<PoolInfo>, RpcError> {
        let Some(pool) = self.pools.list().into_iter().find(|pool| pool.name() == name) else {
            return Ok(None);
        };
        let info = pool.info().await.map_err(pool_error)?;
        let exists = |how: String, field: &str| {
            let text = format!("pool {name} exists already, {how}");
            Err(RpcError::refused(libc::EEXIST, text).with("field", field))
        };
        if self.pool_on(devices).is_none_or(|other| other.uuid() != pool.uuid()) {
            let uris: Vec<&str> = info.devices.iter().map(|device| device.uri.as_str()).collect();
            return exists(format!("on {}", uris.join(", ")), "devices");
        }
        if options.shards.is_some_and(|shards| shards != info.shards) {
            return exists(format!("with {} shards", info.shards), "shards");
        }
        if options.region_bytes.is_some_and(|bytes| bytes != info.region_bytes) {
            return exists(format!("with regions of {} bytes", info.region_bytes), "region_bytes");
        }
        Ok(Some(info))
    }
}
