//! Profiles of devices and links that do not exist, from a few figures.
//!
//! A kernel takes as long as its arithmetic at the device's rate or its bytes at the memory's,
//! whichever is more (a roofline), and a little for being called.

use galaxy_common::{
    Bytes, ClusterProfile, DeviceName, DeviceProfile, Kernel, LinkProfile, LinkType,
    PROFILE_VERSION, Table, WeightFormat,
};
use galaxy_model::ModelSpec;

/// A device that does not exist.
#[derive(Clone, PartialEq, Debug)]
pub struct SyntheticDevice {
    /// The device's name.
    pub name: DeviceName,
    /// 10^9 additions and multiplications per second in products.
    pub gflops: f64,
    /// 10^9 bytes per second from its memory.
    pub memory_rate: f64,
    /// Bytes that it grants.
    pub memory: Bytes,
    /// How many kernel threads it runs.
    pub threads: u16,
    /// Bytes per second that its network interface carries, each way.
    pub link_rate: f64,
    /// Nanoseconds from it to the switch.
    pub latency: f64,
}

/// Nanoseconds that calling a kernel takes.
const CALL: f64 = 1_000.0;
/// Nanoseconds that waking a lane takes.
const WAKE: f64 = 20_000.0;
/// Share of the arithmetic rate that attention reaches: its products are small and a softmax
/// stands between them.
const ATTENTION: f64 = 0.6;

/// Profiles of `devices` for models like `spec`, whose matrices are held in `format`;
/// all devices at one switch, links of all types alike.
pub fn profile(
    spec: &ModelSpec,
    shape: &str,
    format: WeightFormat,
    devices: &[SyntheticDevice],
) -> ClusterProfile {
    let mut links = Vec::new();
    for from in devices {
        for to in devices.iter().filter(|to| to.name != from.name) {
            for link in LinkType::ALL {
                let rate = from.link_rate.min(to.link_rate);
                links.push(LinkProfile {
                    version: PROFILE_VERSION,
                    from: from.name.clone(),
                    to: to.name.clone(),
                    link,
                    latency: from.latency + to.latency,
                    rate,
                    busy_rate: rate,
                    beside: 0,
                    alone: rate,
                    send_cost: 0.0,
                    receive_cost: 0.0,
                    spread: 0.0,
                    measured: 0,
                });
            }
        }
    }
    let each = devices.iter().map(|d| device(spec, shape, format, d));
    ClusterProfile { devices: each.collect(), links }
}

fn device(
    spec: &ModelSpec,
    shape: &str,
    format: WeightFormat,
    device: &SyntheticDevice,
) -> DeviceProfile {
    let hidden = f64::from(spec.hidden);
    // Bytes per nanosecond, operations per nanosecond: 10^9 per second.
    let time =
        |flops: f64, bytes: f64| (flops / device.gflops).max(bytes / device.memory_rate) + CALL;
    let product = |rows: f64, inner: f64, width: f64, matrices: f64| {
        let weights = matrices * format.bytes(inner as u64, width as u64) as f64;
        let bytes = weights + 4.0 * rows * (inner + width);
        time(2.0 * rows * inner * width * matrices, bytes)
    };
    let queries = f64::from(spec.heads) * f64::from(spec.head_width);
    let keys = f64::from(spec.kv_heads) * f64::from(spec.head_width);
    let gates = if spec.gated { 2.0 } else { 1.0 };
    let at = |kernel: Kernel, sizes: &[u32]| {
        let size = |i: usize| f64::from(sizes[i]);
        match kernel {
            Kernel::Qkv | Kernel::Language => product(size(0), hidden, size(1), 1.0),
            Kernel::AttentionOutput | Kernel::Down => product(size(0), size(1), hidden, 1.0),
            Kernel::Up => product(size(0), hidden, size(1), gates),
            Kernel::Attend => {
                let pairs = size(0) * size(1) * size(2);
                let width = f64::from(spec.head_width);
                let bytes = 4.0 * width * size(2) * (2.0 * size(0) + 2.0 * size(1));
                time(4.0 * pairs * width / ATTENTION, bytes)
            }
            // Read two or three rows, write one or two.
            Kernel::AddNorm => time(0.0, size(0) * hidden * 16.0),
            Kernel::ExportAdd => time(0.0, size(0) * hidden * 12.0),
            Kernel::Norm | Kernel::Embed | Kernel::Export | Kernel::Import => {
                time(0.0, size(0) * hidden * 8.0)
            }
        }
    };
    let grow = |points: &[f64]| -> Vec<u32> {
        let mut axis: Vec<u32> = points.iter().map(|p| (p.round() as u32).max(1)).collect();
        axis.sort_unstable();
        axis.dedup();
        axis
    };
    let rows = grow(&[1.0, 16.0, 64.0, 256.0, 1024.0]);
    let parts = |whole: f64| grow(&[whole / 32.0, whole / 8.0, whole / 2.0, whole]);
    let tables = Kernel::ALL.iter().map(|&kernel| {
        let axes = match kernel {
            Kernel::Qkv => vec![rows.clone(), parts(queries + 2.0 * keys)],
            Kernel::AttentionOutput => vec![rows.clone(), parts(queries)],
            Kernel::Up | Kernel::Down => vec![rows.clone(), parts(f64::from(spec.intermediate))],
            Kernel::Language => vec![rows.clone(), parts(f64::from(spec.vocabulary))],
            Kernel::Attend => vec![rows.clone(), rows.clone(), parts(f64::from(spec.heads))],
            _ => vec![rows.clone()],
        };
        let nanos = grid(&axes).iter().map(|sizes| at(kernel, sizes)).collect::<Vec<f64>>();
        let spread = vec![0.0; nanos.len()];
        Table { kernel, axes, nanos, spread }
    });
    DeviceProfile {
        version: PROFILE_VERSION,
        device: device.name.clone(),
        shape: shape.to_owned(),
        threads: device.threads,
        engine: "synthetic".into(),
        measured: 0,
        tables: tables.collect(),
        wake: WAKE,
        memory: device.memory,
        disk: 0.0,
        disk_shared: 0.0,
    }
}

/// All points of a grid, the last axis fastest.
fn grid(axes: &[Vec<u32>]) -> Vec<Vec<u32>> {
    axes.iter().fold(vec![Vec::new()], |points, axis| {
        let longer = |point: Vec<u32>| {
            axis.iter().map(move |&size| {
                let mut longer = point.clone();
                longer.push(size);
                longer
            })
        };
        points.into_iter().flat_map(longer).collect()
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn synthetic_profiles_pass_the_checks_of_measured_profiles() {
        let spec = testing::bert(4, 512);
        let made = profile(&spec, "shape", WeightFormat::F32, &testing::devices(3, 50.0, 1e8));
        for device in &made.devices {
            assert_eq!(device.check("shape"), Ok(()));
        }
        assert!(made.links.iter().all(|l| l.check().is_ok()));
        // Each type of link, between every two devices, both ways.
        assert_eq!(made.links.len(), 6 * LinkType::ALL.len());
    }
}
