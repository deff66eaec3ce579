//! The triad, which measures memory bandwidth.

use hfreduce_kernels::triad;

fn floats(from: u32, count: u32) -> Vec<u8> {
    (0..count).flat_map(|i| ((i + from) as f32).to_le_bytes()).collect()
}

#[test]
fn the_sum_is_right_at_every_length_and_alignment() {
    for count in [0, 1, 3, 15, 16, 17, 31, 100, 1024] {
        let (b, c) = (floats(1, count), floats(2, count));
        let bytes = b.len();
        for at in [0, 4, 1, 2, 36, 60, 63] {
            let mut memory = vec![7; bytes + 128];
            triad(&b, &c, &mut memory[at..at + bytes]);
            let (before, rest) = memory.split_at(at);
            let (sums, after) = rest.split_at(bytes);
            for (i, sum) in sums.chunks_exact(4).enumerate() {
                let value = f32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]);
                assert_eq!(value, (i + 1) as f32 + 3.0 * (i + 2) as f32, "{count} from {at}, {i}");
            }
            assert!(before.iter().chain(after).all(|byte| *byte == 7), "{count} from {at}");
        }
    }
}
