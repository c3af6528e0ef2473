//! Devices under Rimrock's own names.
#![forbid(unsafe_code)]

use crate::control::Daemon;
use crate::control::devices::{OpenDevice, Opening, Origin};
use crate::control::error::RpcError;
use crate::control::schema::{Kind, Param, Params, required};
use crate::control::table::{Chapter, Method};
use crate::device::{DeviceKind, OpenOptions};
use serde_json::{Value, json};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Devices",
    preface: "A device is memory, a file or a block device, opened under a name. What is opened by a call is \
              closed with the daemon; the configuration file opens devices at the start.",
    methods: &[
        Method {
            name: "device_create",
            summary: "Opens a device and gives it a name. Repeating the call gives the same device.",
            params: &[
                required("name", Kind::Name, "What pools and subsystems will call it."),
                required(
                    "uri",
                    URI,
                    "`ram:SIZE`, `uring:PATH` or `uring:PATH?size=SIZE`; options `block_size=512`.",
                ),
            ],
            result: "the device: `name`, `uri`, `kind`, `uuid`, `size`, `block_size`, `write_cache`, `used_by`, \
                     and `traffic`: operations and bytes since it was opened.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "device_list",
            summary: "Lists the open devices.",
            params: &[],
            result: "a list of devices as `device_create` answers them.",
            run: |daemon, _| {
                Box::pin(async move {
                    Ok(daemon.devices.all().iter().map(|device| view(&daemon, device)).collect())
                })
            },
        },
        Method {
            name: "device_get",
            summary: "Shows one device.",
            params: BY_NAME,
            result: "the device.",
            run: |daemon, params| {
                Box::pin(async move { Ok(view(&daemon, &*named(&daemon, params.text("name")?)?)) })
            },
        },
        Method {
            name: "device_delete",
            summary: "Closes a device that nothing uses.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| Box::pin(async move { delete(&daemon, params.text("name")?).await }),
        },
    ],
};

/// A device URI.
pub const URI: Kind = Kind::Text { max: 4096 };
const BY_NAME: &[Param] = &[required("name", Kind::Name, "The device's name or UUID.")];

async fn create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (name, uri) = (params.text("name")?, params.text("uri")?);
    daemon.devices.until_opened(name).await;
    if let Some(device) = daemon.devices.find(name) {
        if device.uri == uri && device.name == name {
            return Ok(view(daemon, &device));
        }
        return Err(RpcError::refused(
            libc::EEXIST,
            format!("device {name} is open already, as {}", device.uri),
        )
        .with("field", "name"));
    }
    let device = daemon.devices.open(Opening {
        name: Some(name.to_owned()),
        uri: uri.to_owned(),
        options: OpenOptions::default(),
        uuid: None,
        origin: Origin::Named,
        field: "uri",
    });
    Ok(view(daemon, &*device.await?))
}

/// The device, or the error that there is none.
pub fn named(daemon: &Daemon, name: &str) -> Result<Rc<OpenDevice>, RpcError> {
    daemon.devices.find(name).ok_or_else(|| {
        let names: Vec<String> = daemon.devices.all().iter().map(|device| device.name.clone()).collect();
        let error = RpcError::refused(libc::ENODEV, format!("there is no device {name}"));
        match crate::nearest::nearest(name, names.iter().map(String::as_str)) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("`rimrock device list` shows the open devices"),
        }
    })
}

/// Closes a device unless something uses it.
pub async fn delete(daemon: &Daemon, name: &str) -> Result<Value, RpcError> {
    let device = {
        // Under the lock no namespace is just coming to use it.
        let _changing = daemon.exports.lock().await;
        let device = named(daemon, name)?;
        if let Some(user) = daemon.user_of(&device) {
            return Err(RpcError::refused(libc::EBUSY, format!("device {name} is in use by {user}")));
        }
        daemon.devices.remove(&device.name);
        device
    };
    daemon.devices.settle(&device).await;
    daemon.devices.close(device).await;
    Ok(Value::Bool(true))
}

fn view(daemon: &Daemon, device: &OpenDevice) -> Value {
    let info = device.device.info();
    let kind = match info.kind {
        DeviceKind::Ram => "ram",
        DeviceKind::Sim => "sim",
        DeviceKind::Uring => "uring",
    };
    let traffic = device.device.traffic();
    json!({
        "name": device.name,
        "uri": device.uri,
        "kind": kind,
        "uuid": device.uuid,
        "size": info.size,
        "block_size": info.block_size,
        "write_cache": info.write_cache,
        "used_by": daemon.user_of(device),
        "traffic": {
            "reads": traffic.reads,
            "read_bytes": traffic.read_bytes,
            "writes": traffic.writes,
            "written_bytes": traffic.written_bytes,
            "flushes": traffic.flushes,
            "discards": traffic.discards,
            "discarded_bytes": traffic.discarded_bytes,
        },
    })
}
