//! Block devices under SPDK's names and in SPDK's shapes: devices, volumes and snapshots alike.
#![forbid(unsafe_code)]

use super::{device, lvol};
use crate::control::Daemon;
use crate::control::devices::{OpenDevice, Opening, Origin};
use crate::control::error::{RpcError, errno_text};
use crate::control::schema::{Kind, Param, Params, UNSIGNED, optional, required};
use crate::control::table::{Chapter, Method};
use crate::device::{DeviceKind, OpenOptions};
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "SPDK: block devices",
    preface: "A bdev is a device, a volume or a snapshot. A volume's bdev name is its UUID, with the alias \
              POOL/NAME. Errors have SPDK's codes and texts, with our own reason in `data`.",
    methods: &[
        Method {
            name: "bdev_malloc_create",
            summary: "Opens memory as a device.",
            params: &[
                optional("name", Kind::Name, "Its name; `Malloc0`, `Malloc1` … when left out."),
                required("num_blocks", Kind::Unsigned { min: 1, max: u64::MAX }, "Its size in blocks."),
                required("block_size", BLOCK_SIZE, "Bytes in a block, 512 or 4096."),
                optional("uuid", Kind::Uuid, "Its UUID; a random one when left out."),
                optional("physical_block_size", UNSIGNED, "Accepted and ignored."),
                optional("optimal_io_boundary", UNSIGNED, "Accepted and ignored."),
                optional("md_size", ZERO, "Metadata per block; there is none here."),
                optional("md_interleave", Kind::Off, "Metadata; there is none here."),
                optional("dif_type", ZERO, "Protection information; there is none here."),
                optional("dif_is_head_of_md", Kind::Off, "Protection information; there is none here."),
                optional("dif_pi_format", ZERO, "Protection information; there is none here."),
                optional("numa_id", Kind::Signed { min: -1, max: 1023 }, "Accepted and ignored."),
            ],
            result: "the name.",
            run: |daemon, params| Box::pin(async move { malloc_create(&daemon, &params).await }),
        },
        Method {
            name: "bdev_malloc_delete",
            summary: "Closes a device that `bdev_malloc_create` opened.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(
                    async move { delete(&daemon, &params, |origin| matches!(origin, Origin::Malloc)).await },
                )
            },
        },
        Method {
            name: "bdev_aio_create",
            summary: "Opens an existing file or block device, through io_uring.",
            params: &[
                required("name", Kind::Name, "Its name."),
                required("filename", PATH, "The file or block device."),
                optional("block_size", BLOCK_SIZE, "Bytes in a block, 512 or 4096."),
                optional("readonly", Kind::Bool, "Refuse writes."),
                optional("fallocate", Kind::Bool, "Accepted; unmap always gives space back."),
                optional("uuid", Kind::Uuid, "Its UUID; a random one when left out."),
                optional("nowait", Kind::Bool, "Accepted and ignored."),
            ],
            result: "the name.",
            run: |daemon, params| Box::pin(async move { file_create(&daemon, &params, true).await }),
        },
        Method {
            name: "bdev_aio_delete",
            summary: "Closes a device that `bdev_aio_create` opened.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    delete(&daemon, &params, |origin| matches!(origin, Origin::Aio { .. })).await
                })
            },
        },
        Method {
            name: "bdev_uring_create",
            summary: "Opens an existing file or block device, through io_uring.",
            params: &[
                required("name", Kind::Name, "Its name."),
                required("filename", PATH, "The file or block device."),
                optional("block_size", BLOCK_SIZE, "Bytes in a block, 512 or 4096."),
                optional("uuid", Kind::Uuid, "Its UUID; a random one when left out."),
            ],
            result: "the name.",
            run: |daemon, params| Box::pin(async move { file_create(&daemon, &params, false).await }),
        },
        Method {
            name: "bdev_uring_delete",
            summary: "Closes a device that `bdev_uring_create` opened.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    delete(&daemon, &params, |origin| matches!(origin, Origin::Uring { .. })).await
                })
            },
        },
        Method {
            name: "bdev_get_bdevs",
            summary: "Lists all devices, volumes and snapshots, or shows one.",
            params: &[
                optional("name", BDEV, "Only this one: its name, alias or UUID."),
                optional(
                    "timeout",
                    UNSIGNED,
                    "With `name`: wait so many milliseconds for it to appear; at most a minute.",
                ),
            ],
            result: "a list of bdevs in SPDK's shape.",
            run: |daemon, params| Box::pin(async move { get_bdevs(&daemon, &params).await }),
        },
        Method {
            name: "bdev_wait_for_examine",
            summary: "Does nothing: pools come up only when they are imported.",
            params: &[],
            result: "`true`.",
            run: |_, _| Box::pin(async { Ok(Value::Bool(true)) }),
        },
    ],
};

/// What names a bdev.
pub const BDEV: Kind = Kind::Text { max: 512 };
const PATH: Kind = Kind::Text { max: 4096 };
const ZERO: Kind = Kind::Unsigned { min: 0, max: 0 };
/// What a block may have in bytes.
pub const BLOCK_SIZE: Kind = Kind::Choice(&[512, 4096]);
/// The longest wait for a bdev, in milliseconds.
const TIMEOUT_MAX: u64 = 60_000;
/// Memory that memory devices leave to the rest of the machine.
const MEMORY_MARGIN: u64 = 256 << 20;
const BY_NAME: &[Param] = &[required("name", Kind::Name, "The device's name or UUID.")];

/// An error in SPDK's words: the errno's own text as the message, ours as the reason.
pub fn errno(errno: i32, reason: impl Into<String>) -> RpcError {
    RpcError::refused(errno, reason).spoken_as(-i64::from(errno), errno_text(errno))
}

async fn malloc_create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let block_size = params.u64_opt("block_size")?.unwrap_or(4096);
    let size = params.u64("num_blocks")?.checked_mul(block_size).filter(|size| i64::try_from(*size).is_ok());
    let size = size.ok_or_else(|| RpcError::field("num_blocks", "the device would be larger than 8 EiB"))?;
    if let Some(available) = available_memory()
        && size > available.saturating_sub(MEMORY_MARGIN)
    {
        let reason =
            format!("{size} bytes are asked for; {available} are available, some of which must stay free");
        return Err(errno(libc::ENOMEM, reason));
    }
    let name = match params.text_opt("name")? {
        Some(name) => name.to_owned(),
        None => (0..)
            .map(|number: u32| format!("Malloc{number}"))
            .find(|name| daemon.devices.find(name).is_none())
            .unwrap_or_default(),
    };
    open(
        daemon,
        Opening {
            name: Some(name),
            uri: format!("ram:{size}?block_size={block_size}&populate=yes"),
            options: OpenOptions::default(),
            uuid: params.uuid_opt("uuid")?,
            origin: Origin::Malloc,
            field: "num_blocks",
        },
    )
    .await
}

/// Bytes that can be taken without pushing others out, as the kernel estimates (proc(5), `MemAvailable`).
fn available_memory() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

async fn file_create(daemon: &Rc<Daemon>, params: &Params, aio: bool) -> Result<Value, RpcError> {
    let filename = params.text("filename")?.to_owned();
    if filename.contains(['?', '&']) {
        return Err(RpcError::field("filename", "must not hold ? or &"));
    }
    let mut uri = format!("uring:{filename}");
    let given = params.u64_opt("block_size")?;
    if let Some(block_size) = given {
        uri.push_str(&format!("?block_size={block_size}"));
    }
    let read_only = aio && params.bool_opt("readonly")?.unwrap_or(false);
    let origin = if aio {
        Origin::Aio { filename, read_only, block_size_given: given.is_some() }
    } else {
        Origin::Uring { filename }
    };
    open(
        daemon,
        Opening {
            name: Some(params.text("name")?.to_owned()),
            uri,
            options: OpenOptions { read_only },
            uuid: params.uuid_opt("uuid")?,
            origin,
            field: "filename",
        },
    )
    .await
}

async fn open(daemon: &Rc<Daemon>, opening: Opening) -> Result<Value, RpcError> {
    let clash = |device: &Rc<OpenDevice>| Some(device.uuid) == opening.uuid;
    if daemon.devices.all().iter().any(clash) {
        return Err(errno(libc::EEXIST, "the UUID is that of another device"));
    }
    match daemon.devices.open(opening).await {
        Ok(device) => Ok(Value::String(device.name.clone())),
        Err(error) if error.code == -i64::from(libc::EEXIST) => {
            Err(error.spoken_as(-i64::from(libc::EEXIST), errno_text(libc::EEXIST)))
        }
        Err(error) => Err(error),
    }
}

/// Closes a device that was opened by the call that belongs to this one; to SPDK's clients there is no other.
async fn delete(daemon: &Rc<Daemon>, params: &Params, own: fn(&Origin) -> bool) -> Result<Value, RpcError> {
    let name = params.text("name")?;
    if daemon.devices.find(name).is_some_and(|device| !own(&device.origin)) {
        let reason = format!("device {name} was opened by another call; device_delete closes it");
        return Err(errno(libc::ENODEV, reason));
    }
    device::delete(daemon, params.text("name")?).await.map_err(|error| {
        let errno = i32::try_from(-error.code).unwrap_or(libc::EIO);
        let code = error.code;
        error.spoken_as(code, errno_text(errno))
    })
}

async fn get_bdevs(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let Some(name) = params.text_opt("name")? else {
        let mut bdevs: Vec<Value> = daemon.devices.all().iter().map(|device| device_bdev(device)).collect();
        bdevs.extend(lvol::all_bdevs(daemon).await?);
        return Ok(Value::Array(bdevs));
    };
    let wait = Duration::from_millis(params.u64_opt("timeout")?.unwrap_or(0).min(TIMEOUT_MAX));
    let started = Instant::now();
    loop {
        if let Some(bdev) = one(daemon, name).await {
            return Ok(json!([bdev]));
        }
        if wait.is_zero() {
            return Err(errno(libc::ENODEV, format!("there is no bdev {name}")));
        }
        if started.elapsed() >= wait {
            let reason = format!("no bdev {name} appeared");
            return Err(RpcError::refused(libc::ETIMEDOUT, reason).spoken_as(-110, "Connection timed out"));
        }
        tokio::time::sleep(Duration::from_millis(10).min(wait)).await;
    }
}

async fn one(daemon: &Rc<Daemon>, name: &str) -> Option<Value> {
    match daemon.devices.find(name) {
        Some(device) => Some(device_bdev(&device)),
        None => lvol::one_bdev(daemon, name).await,
    }
}

/// What differs between one bdev and another, of the members SPDK shows.
pub struct Shape<'a> {
    /// The name on the wire.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// SPDK's word for the kind.
    pub product_name: &'a str,
    /// Bytes in a block.
    pub block_size: u64,
    /// Size in blocks.
    pub num_blocks: u64,
    /// Its UUID.
    pub uuid: String,
    /// Who may not write to it any more because something else does.
    pub claimed: bool,
    /// Whether it takes writes.
    pub writable: bool,
    /// What is special about the kind.
    pub driver_specific: Value,
}

/// A bdev in SPDK's shape. The hints of zero are SPDK's own for what has no preference.
pub fn bdev(shape: Shape<'_>) -> Value {
    let writable = shape.writable;
    let mut supported = Map::new();
    for kind in ["read", "flush", "reset"] {
        supported.insert(kind.to_owned(), Value::Bool(true));
    }
    for kind in ["write", "unmap", "write_zeroes"] {
        supported.insert(kind.to_owned(), Value::Bool(writable));
    }
    const NEVER: [&str; 16] = [
        "nvme_admin",
        "nvme_io",
        "nvme_io_md",
        "zcopy",
        "get_zone_info",
        "zone_management",
        "zone_append",
        "compare",
        "compare_and_write",
        "abort",
        "seek_hole",
        "seek_data",
        "copy",
        "nvme_iov_md",
        "nvme_nssr",
        "write_uncorrectable",
    ];
    for kind in NEVER {
        supported.insert(kind.to_owned(), Value::Bool(false));
    }
    let mut bdev = json!({
        "name": shape.name,
        "aliases": shape.aliases,
        "product_name": shape.product_name,
        "block_size": shape.block_size,
        "num_blocks": shape.num_blocks,
        "preferred_write_alignment": 0,
        "preferred_write_granularity": 0,
        "optimal_write_size": 0,
        "preferred_unmap_alignment": 0,
        "preferred_unmap_granularity": 0,
        "uuid": shape.uuid,
        "numa_id": -1,
        "assigned_rate_limits": {
            "rw_ios_per_sec": 0, "rw_mbytes_per_sec": 0, "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 0,
        },
        "claimed": shape.claimed,
    });
    if let Value::Object(members) = &mut bdev {
        if shape.claimed {
            members.insert("claim_type".to_owned(), json!("exclusive_write"));
        }
        members.insert("zoned".to_owned(), Value::Bool(false));
        members.insert("supported_io_types".to_owned(), Value::Object(supported));
        members.insert("driver_specific".to_owned(), shape.driver_specific);
    }
    bdev
}

fn device_bdev(device: &OpenDevice) -> Value {
    let info = device.device.info();
    let path = info.uri.split_once(':').map_or("", |(_, rest)| rest.split('?').next().unwrap_or(""));
    let (product_name, driver_specific) = match (&device.origin, info.kind) {
        (Origin::Aio { filename, read_only, block_size_given }, _) => (
            "AIO disk",
            json!({ "aio": {
                "filename": filename, "block_size_override": block_size_given, "readonly": read_only,
                "fallocate": true, "nowait": false,
            }}),
        ),
        (Origin::Uring { filename }, _) => ("URING bdev", json!({ "uring": { "filename": filename } })),
        (_, DeviceKind::Uring) => ("URING bdev", json!({ "uring": { "filename": path } })),
        (_, DeviceKind::Ram) => ("Malloc disk", json!({})),
        (_, DeviceKind::Sim) => ("Simulated disk", json!({})),
    };
    let writable = !matches!(device.origin, Origin::Aio { read_only: true, .. });
    bdev(Shape {
        name: device.name.clone(),
        aliases: vec![device.uuid.to_string()],
        product_name,
        block_size: info.block_size.into(),
        num_blocks: info.size / u64::from(info.block_size),
        uuid: device.uuid.to_string(),
        claimed: device.pool.borrow().is_some(),
        writable,
        driver_specific,
    })
}
