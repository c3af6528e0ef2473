//! Pools.
#![forbid(unsafe_code)]

use super::device::URI;
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::lookup::pool_error;
use crate::control::schema::{Kind, Param, Params, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::PoolOptions;
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
                optional(
                    "force",
                    Kind::Bool,
                    "Overwrite what lies on the devices: a pool, a filesystem, a partition table.",
                ),
            ],
            result: "the pool: `name`, `uuid`, `devices`, `shards`, `capacity`, `allocated`, `free`, `health` and more.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "pool_import",
            summary: "Brings a pool up from its devices, with everything exported from it. Repeating the call gives the \
                      same pool.",
            params: &[required("devices", DEVICES, "All its devices by name or URI, in any order.")],
            result: "the pool, and in `warnings` what of its exports could not be brought back, if anything.",
            run: |daemon, params| Box::pin(async move { import(&daemon, &params).await }),
        },
        Method {
            name: "pool_export",
            summary: "Takes a pool down cleanly. Its exports disappear until it is imported again.",
            params: &[
                required("name", Kind::Name, "The pool's name or UUID."),
                optional(
                    "force",
                    Kind::Bool,
                    "Disconnect the hosts that use it; refused without while there are any.",
                ),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let force = params.bool_opt("force")?.unwrap_or(false);
                    daemon.export_pool(params.text("name")?, force).await?;
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
                    let name = daemon.pool_named(params.text("name")?)?.name().to_owned();
                    if params.text("confirm")? != name {
                        return Err(RpcError::field("confirm", format!("must be the pool's name, {name}")));
                    }
                    daemon.destroy_pool(&name).await?;
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
    let options = PoolOptions {
        shards: params.u64_opt("shards")?.and_then(|shards| u16::try_from(shards).ok()),
        region_bytes: params.u64_opt("region_bytes")?,
        force: params.bool_opt("force")?.unwrap_or(false),
    };
    Ok(json!(daemon.create_pool(name, &devices, options).await?))
}

async fn import(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (info, warnings) = daemon.import_pool(&params.texts("devices")?).await?;
    let mut pool = json!(info);
    if let (Value::Object(members), false) = (&mut pool, warnings.is_empty()) {
        members.insert("warnings".to_owned(), json!(warnings));
    }
    Ok(pool)
}
