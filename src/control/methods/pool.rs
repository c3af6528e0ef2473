//! Pools.
#![forbid(unsafe_code)]

use super::device::URI;
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::pools::pool_error;
use crate::control::schema::{Kind, Param, Params, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::{PoolInfo, PoolOptions};
use serde_json::{Value, json};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Pools",
    preface: "A pool keeps thin volumes and their snapshots on one or more devices. It is known again by what is \
              written on the devices, whatever they are called after a reboot.",
    methods: &[
        Method {
            name: "pool_create",
            summary: "Creates a pool. Repeating the call gives the same pool.",
            params: &[
                required("name", Kind::Name, "Its name."),
                required("devices", DEVICES, "Devices by name, or by URI."),
                optional(
                    "shards",
                    Kind::Unsigned { min: 1, max: 256 },
                    "Parts that work independently; fixed for the pool's life.",
                ),
                optional(
                    "region_bytes",
                    Kind::Unsigned { min: 1 << 20, max: 64 << 20 },
                    "Unit in which space is handed to shards, in bytes.",
                ),
                optional("force", Kind::Bool, "Overwrite a pool that lies on the devices."),
            ],
            result: "the pool: `name`, `uuid`, `devices`, `shards`, `capacity`, `allocated`, `free`, `health` and more.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "pool_import",
            summary: "Brings a pool up from its devices, with everything exported from it.",
            params: &[required("devices", DEVICES, "All its devices by name or URI, in any order.")],
            result: "the pool.",
            run: |daemon, params| {
                Box::pin(async move { Ok(json!(daemon.import_pool(&params.texts("devices")?).await?)) })
            },
        },
        Method {
            name: "pool_export",
            summary: "Takes a pool down cleanly. Its exports disappear until it is imported again.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    daemon.export_pool(params.text("name")?).await?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "pool_list",
            summary: "Lists the imported pools.",
            params: &[],
            result: "a list of pools.",
            run: |daemon, _| {
                Box::pin(async move {
                    let mut pools = Vec::new();
                    for pool in daemon.pools.list() {
                        pools.push(pool.info().await.map_err(pool_error)?);
                    }
                    Ok(json!(pools))
                })
            },
        },
        Method {
            name: "pool_get",
            summary: "Shows one pool.",
            params: BY_NAME,
            result: "the pool.",
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    Ok(json!(pool.info().await.map_err(pool_error)?))
                })
            },
        },
        Method {
            name: "pool_destroy",
            summary: "Destroys a pool and everything in it. Nothing of it may be exported.",
            params: &[
                required("name", Kind::Name, "Its name or UUID."),
                required("confirm", Kind::Text { max: 223 }, "Its name once more."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    let name = pool.name();
                    if params.text("confirm")? != name {
                        return Err(RpcError::field("confirm", format!("must be the pool's name, {name}")));
                    }
                    daemon.destroy_pool(name).await?;
                    Ok(Value::Bool(true))
                })
            },
        },
    ],
};

const DEVICES: Kind = Kind::List { of: &URI, max: 256 };
const BY_NAME: &[Param] = &[required("name", Kind::Name, "The pool's name or UUID.")];

async fn create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (name, devices) = (params.text("name")?, params.texts("devices")?);
    if devices.is_empty() {
        return Err(RpcError::field("devices", "must name at least one device"));
    }
    if let Some(existing) = daemon.same_pool(name, &devices).await? {
        return Ok(json!(existing));
    }
    let options = PoolOptions {
        shards: params.u64_opt("shards")?.and_then(|shards| u16::try_from(shards).ok()),
        region_bytes: params.u64_opt("region_bytes")?,
        force: params.bool_opt("force")?.unwrap_or(false),
    };
    Ok(json!(daemon.create_pool(name, &devices, options).await?))
}

/// The operations of the daemon on whole pools.
impl Daemon {
    /// Creates a pool.
    pub(crate) async fn create_pool(
        &self,
        name: &str,
        devices: &[String],
        options: PoolOptions,
    ) -> Result<PoolInfo, RpcError> {
        let devices = self.pool_devices(devices).await?;
        let handles = devices.iter().map(|device| device.device.clone()).collect();
        match self.pools.create(name, handles, options).await {
            Ok(pool) => {
                self.devices.set_pool(&devices, Some(pool.name()));
                pool.info().await.map_err(pool_error)
            }
            Err(error) => {
                self.close_unused(&devices);
                Err(pool_error(error))
            }
        }
    }

    /// Imports a pool and opens what is exported from it.
    pub(crate) async fn import_pool(&self, devices: &[String]) -> Result<PoolInfo, RpcError> {
        if devices.is_empty() {
            return Err(RpcError::field("devices", "must name at least one device"));
        }
        let info = self.import_pool_quietly(devices).await?;
        let _changing = self.exports.lock().await;
        let listeners = self.restore_exports(&info.name).await;
        self.open_listeners(listeners).await;
        Ok(info)
    }

    /// Imports a pool and leaves its exports alone.
    pub(crate) async fn import_pool_quietly(&self, devices: &[String]) -> Result<PoolInfo, RpcError> {
        let devices = self.pool_devices(devices).await?;
        let handles = devices.iter().map(|device| device.device.clone()).collect();
        match self.pools.import(handles).await {
            Ok(pool) => {
                self.devices.set_pool(&devices, Some(pool.name()));
                pool.info().await.map_err(pool_error)
            }
            Err(error) => {
                self.close_unused(&devices);
                Err(pool_error(error))
            }
        }
    }

    /// Takes a pool and its exports down.
    pub(crate) async fn export_pool(&self, name: &str) -> Result<(), RpcError> {
        let name = self.pool_named(name)?.name().to_owned();
        let _changing = self.exports.lock().await;
        self.withdraw_exports(&name).await.map_err(|error| super::nvmf::target_error(&error))?;
        self.pools.export(&name).await.map_err(pool_error)?;
        self.free_devices(&name).await;
        Ok(())
    }

    /// Destroys a pool that nothing is exported from.
    pub(crate) async fn destroy_pool(&self, name: &str) -> Result<(), RpcError> {
        let _changing = self.exports.lock().await;
        if let Some((nqn, nsid)) = self.exports.of_pool(name).first() {
            return Err(RpcError::refused(
                libc::EBUSY,
                format!("pool {name} is exported, as namespace {nsid} of {nqn}"),
            )
            .hint("end its exports first, with volume_unexport or nvmf_delete_subsystem"));
        }
        self.pools.destroy(name).await.map_err(pool_error)?;
        self.forget_home(name);
        self.free_devices(name).await;
        Ok(())
    }

    async fn free_devices(&self, pool: &str) {
        let devices = self.devices.of_pool(pool);
        for device in &devices {
            self.devices.settle(device).await;
        }
        self.devices.set_pool(&devices, None);
    }

    /// The pool of that name if it lies on just these devices; an error if it lies on others.
    async fn same_pool(&self, name: &str, devices: &[String]) -> Result<Option<PoolInfo>, RpcError> {
        let Ok(pool) = self.pools.get(name) else { return Ok(None) };
        let info = pool.info().await.map_err(pool_error)?;
        let mut own = self.devices.of_pool(&info.name);
        own.retain(|device| !devices.iter().any(|named| *named == device.name || *named == device.uri));
        if own.is_empty() && devices.len() == info.devices.len() && info.name == name {
            return Ok(Some(info));
        }
        let uris: Vec<&str> = info.devices.iter().map(|device| device.uri.as_str()).collect();
        Err(RpcError::refused(libc::EEXIST, format!("pool {name} exists already, on {}", uris.join(", ")))
            .with("field", "name"))
    }
}
