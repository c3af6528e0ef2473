//! Pools.
#![forbid(unsafe_code)]

use super::device::URI;
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::lookup::pool_error;
use crate::control::schema::{Kind, Param, Params, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::{CheckOptions, PoolOptions};
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
            result: "the pool: `name`, `uuid`, `devices`, `shards`, `capacity`, `allocated`, `free`, `health`, `damage`, `unfinished` and more.",
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
            name: "pool_check",
            summary: "Checks a pool while it is in use: that each block in use has one owner, that every copy of all \
                      metadata fits its checksum, that all counts and the catalog agree with a walk over everything.",
            params: &[
                required("name", Kind::Name, "The pool's name or UUID."),
                optional(
                    "repair",
                    Kind::Bool,
                    "Write again what can be derived: damaged copies, bitmaps, counts. Nothing is dropped.",
                ),
                optional("data", Kind::Bool, "Read every block of data too."),
            ],
            result: "what was found: `clean`, `findings` (each with `severity`, `kind`, `what`, `place`, `extents`, \
                     `cost`, `repairable`, `repaired`), and how much was looked at.",
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    let options = CheckOptions {
                        repair: params.bool_opt("repair")?.unwrap_or(false),
                        data: params.bool_opt("data")?.unwrap_or(false),
                    };
                    Ok(json!(pool.check(options).await.map_err(pool_error)?))
                })
            },
        },
        Method {
            name: "pool_damage_list",
            summary: "Lists the damage that was come upon since the import, healed or not.",
            params: BY_NAME,
            result: "a list: `kind`, `state` (healed, degraded or lost), `what`, `place` on the device, and in \
                     `extents` the volumes and snapshots that have it now, with the blocks in them.",
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    Ok(json!(pool.damage().await.map_err(pool_error)?))
                })
            },
        },
        Method {
            name: "pool_damage_clear",
            summary: "Forgets the damage listed so far. What is still damaged is found again.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    pool.damage_clear().await.map_err(pool_error)?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "pool_scrub_start",
            summary: "Starts to read everything in a pool in the background and to heal what is damaged, or lets a \
                      stopped scrub go on. Of one that runs, changes the rate.",
            params: &[
                required("name", Kind::Name, "The pool's name or UUID."),
                optional("rate", Kind::Unsigned { min: 1 << 20, max: 1 << 50 }, "Bytes a second at most."),
                optional("anew", Kind::Bool, "Begin at the beginning, whatever was read before."),
            ],
            result: SCRUB,
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    let anew = params.bool_opt("anew")?.unwrap_or(false);
                    let status = pool.scrub_start(params.u64_opt("rate")?, anew).await;
                    Ok(json!(status.map_err(pool_error)?))
                })
            },
        },
        Method {
            name: "pool_scrub_stop",
            summary: "Stops a scrub where it is; it can go on from there.",
            params: BY_NAME,
            result: SCRUB,
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    Ok(json!(pool.scrub_stop().await.map_err(pool_error)?))
                })
            },
        },
        Method {
            name: "pool_get_scrub",
            summary: "Shows how a pool's scrub stands.",
            params: BY_NAME,
            result: SCRUB,
            run: |daemon, params| {
                Box::pin(async move {
                    let pool = daemon.pool_named(params.text("name")?)?;
                    Ok(json!(pool.scrub_status().await.map_err(pool_error)?))
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
const SCRUB: &str = "how the scrub stands: `state`, `rate`, `bytes_total`, `bytes_done`, `errors`, `healed`, \
                     `eta_seconds`, `last_completed`.";
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
