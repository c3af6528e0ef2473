//! Finding pools and nodes by what callers call them, and saying what a pool refuses.
#![forbid(unsafe_code)]

use super::Daemon;
use super::devices::{OpenDevice, Opening, Origin};
use super::error::RpcError;
use super::exports::{Addition, Place};
use super::methods::device::named;
use crate::device::OpenOptions;
use crate::nearest::nearest;
use crate::pool::{NodeInfo, NodeKind, Pool, PoolError, PoolErrorKind};
use crate::target::Backend;
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

const NO_POOL: &str =
    "no pool is imported: `rimrock pool create` makes one, `rimrock pool import` brings one back";

/// A node and the pool it lies in.
pub struct Found {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The node.
    pub node: NodeInfo,
}

impl Daemon {
    /// The pool of that name or UUID.
    pub(super) fn pool_named(&self, name: &str) -> Result<Arc<Pool>, RpcError> {
        self.pools.get(name).map_err(|_| {
            let pools = self.pools.list();
            let names: Vec<&str> = pools.iter().map(|pool| pool.name()).collect();
            let error = RpcError::refused(libc::ENODEV, format!("there is no pool {name}"));
            match nearest(name, names.iter().copied()) {
                Some(near) => error.hint(format!("did you mean {near}?")),
                None if names.is_empty() => error.hint(NO_POOL),
                None => error.hint(format!("imported are {}", names.join(", "))),
            }
        })
    }

    /// The named pool, or the only one.
    pub(super) fn pool_or_only(&self, name: Option<&str>) -> Result<Arc<Pool>, RpcError> {
        if let Some(name) = name {
            return self.pool_named(name);
        }
        let mut pools = self.pools.list();
        if pools.len() > 1 {
            let names: Vec<&str> = pools.iter().map(|pool| pool.name()).collect();
            return Err(RpcError::field(
                "pool",
                format!("is needed where there are several: {}", names.join(", ")),
            ));
        }
        pools.pop().ok_or_else(|| RpcError::refused(libc::ENODEV, "no pool is imported").hint(NO_POOL))
    }

    /// The volume or snapshot called `name`: `NAME`, `POOL/NAME` or a UUID.
    pub(super) async fn node(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let (pools, plain) = match name.split_once('/') {
            Some((pool, plain)) => (vec![self.pool_named(pool)?], plain),
            None => (self.pools.list(), name),
        };
        let mut found: Option<Found> = None;
        for pool in &pools {
            let node = match pool.find(plain).await {
                Ok(node) => node,
                Err(error) if error.kind == PoolErrorKind::NotFound => continue,
                Err(error) => return Err(pool_error(error)),
            };
            if let Some(other) = found {
                let (one, other) = (pool.name(), other.pool.name());
                let reason = format!("{plain} is in the pools {other} and {one}; say POOL/NAME");
                return Err(RpcError::field(field, reason));
            }
            found = Some(Found { pool: pool.clone(), node });
        }
        match found {
            Some(found) => Ok(found),
            None => Err(self.no_node(&pools, name, plain).await),
        }
    }

    async fn no_node(&self, pools: &[Arc<Pool>], name: &str, plain: &str) -> RpcError {
        let error = RpcError::refused(libc::ENODEV, format!("there is no volume or snapshot {name}"));
        if pools.is_empty() {
            return error.hint(NO_POOL);
        }
        let mut names = Vec::new();
        for pool in pools {
            names.extend(pool.nodes().await.unwrap_or_default().into_iter().map(|node| node.name));
        }
        match nearest(plain, names.iter().map(String::as_str)) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("`rimrock volume list` and `rimrock snapshot list` show what there is"),
        }
    }

    /// The volume called `name`; a snapshot is refused.
    pub(super) async fn volume(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let found = self.node(field, name).await?;
        match found.node.kind {
            NodeKind::Volume => Ok(found),
            NodeKind::Snapshot => Err(RpcError::field(field, format!("{name} is a snapshot, not a volume"))),
        }
    }

    /// The snapshot called `name`; a volume is refused.
    pub(super) async fn snapshot(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let found = self.node(field, name).await?;
        match found.node.kind {
            NodeKind::Snapshot => Ok(found),
            NodeKind::Volume => Err(RpcError::field(field, format!("{name} is a volume, not a snapshot"))),
        }
    }

    /// What stands behind a bdev name: a device, or a volume or snapshot by UUID or POOL/NAME.
    pub(super) async fn backend(&self, bdev_name: &str) -> Option<Addition> {
        if let Some(device) = self.devices.find(bdev_name) {
            if device.pool.borrow().is_some() {
                return None;
            }
            return Some(Addition {
                place: Place::Device { name: device.name.clone() },
                backend: Backend::Device(device.device.clone()),
                bdev_name: device.name.clone(),
                nsid: None,
                uuid: Some(device.uuid),
                nguid: None,
                eui64: None,
                block_size: None,
                read_only: false,
            });
        }
        let by_its_name = bdev_name.contains('/') || Uuid::try_parse(bdev_name).is_ok();
        let found = self.node("bdev_name", bdev_name).await.ok().filter(|_| by_its_name)?;
        self.node_backend(&found).await.ok()
    }

    /// A namespace for a volume or snapshot.
    pub(super) async fn node_backend(&self, found: &Found) -> Result<Addition, RpcError> {
        let volume = found.pool.open(&found.node.uuid.to_string()).await.map_err(pool_error)?;
        Ok(Addition {
            place: Place::Node { pool: found.pool.name().to_owned(), uuid: found.node.uuid },
            backend: Backend::Volume(volume),
            bdev_name: found.node.uuid.to_string(),
            nsid: None,
            uuid: None,
            nguid: None,
            eui64: None,
            block_size: Some(found.node.block_size),
            read_only: false,
        })
    }

    /// The devices a pool command names, by name or by URI; those given by URI are opened.
    pub(super) async fn pool_devices(&self, names: &[String]) -> Result<Vec<Rc<OpenDevice>>, RpcError> {
        let mut devices: Vec<Rc<OpenDevice>> = Vec::new();
        for name in names {
            let device = match self.devices.find(name) {
                Some(device) => Ok(device),
                None if name.contains(':') => self.device_by_uri(name).await,
                None => named(self, name),
            };
            let checked = device.and_then(|device| {
                if devices.iter().any(|other| other.name == device.name) {
                    return Err(RpcError::field("devices", format!("{name} is named twice")));
                }
                if let Some(user) = self.user_of(&device) {
                    let text = format!("device {name} is in use by {user}");
                    return Err(RpcError::refused(libc::EBUSY, text).with("field", "devices"));
                }
                Ok(device)
            });
            match checked {
                Ok(device) => devices.push(device),
                Err(error) => {
                    self.close_unused(&devices);
                    return Err(error);
                }
            }
        }
        Ok(devices)
    }

    async fn device_by_uri(&self, uri: &str) -> Result<Rc<OpenDevice>, RpcError> {
        if let Some(device) = self.devices.all().into_iter().find(|device| device.uri == uri) {
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

    /// Closes devices that were opened for a pool that did not come to be.
    pub(super) fn close_unused(&self, devices: &[Rc<OpenDevice>]) {
        self.devices.set_pool(devices, None);
    }
}

/// A refusal of a pool.
pub fn pool_error(error: PoolError) -> RpcError {
    let errno = match error.kind {
        PoolErrorKind::NotFound => libc::ENODEV,
        PoolErrorKind::Exists => libc::EEXIST,
        PoolErrorKind::Invalid => libc::EINVAL,
        PoolErrorKind::Busy => libc::EBUSY,
        PoolErrorKind::NoSpace => libc::ENOSPC,
        PoolErrorKind::Failed => libc::EIO,
    };
    RpcError::refused(errno, error.text)
}
