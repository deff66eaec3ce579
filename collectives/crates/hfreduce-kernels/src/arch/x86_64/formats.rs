//! Code of both vector widths, as macros: it differs in the vector types and in the names of the instructions
//! alone. Integer operations are those that the file imports under a name without the width.

/// Implements an instruction set from its name and the processor's features.
macro_rules! machine {
    ($machine:ident, $features:literal) => {
        impl Machine for $machine {
            #[inline(always)]
            unsafe fn fence() {
                // SAFETY: every x86-64 processor has the instruction.
                unsafe { _mm_sfence() }
            }
            #[inline(always)]
            unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
                store: Store,
                pass: &Pass<'_>,
            ) where
                O: Combine<V> + Combine<S>,
            {
                // SAFETY: guaranteed by the caller.
                unsafe { streams::<V, F, S, T, O>(store, pass) }
            }
        }

        /// # Safety
        /// As for [`generic::reduce`]; the processor has these features.
        #[target_feature(enable = $features)]
        #[inline(never)]
        unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
            store: Store,
            pass: &Pass<'_>,
        ) where
            O: Combine<V> + Combine<S>,
        {
            // SAFETY: guaranteed by the caller.
            unsafe { generic::streams::<$machine, V, F, S, T, O>(store, pass) }
        }
    };
}

/// Implements `store` and `stream` of a format with its `write`.
macro_rules! stores {
    ($block:ty) => {
        #[inline(always)]
        unsafe fn store(destination: *mut u8, block: $block) {
            // SAFETY: the caller's pointer is good for the block.
            unsafe { Self::write::<false>(destination, block) }
        }
        #[inline(always)]
        unsafe fn stream(destination: *mut u8, block: $block) {
            // SAFETY: as for `store`, and aligned.
            unsafe { Self::write::<true>(destination, block) }
        }
    };
}

/// Implements an 8-bit format with `write_bytes` and a `widen` of one line, in the order of quarters.
macro_rules! bytes {
    ($vector:ty, $read:ident, $format:ident, $kind:ty, $widen:path) => {
        impl $format {
            /// # Safety
            /// As for [`put`].
            #[inline(always)]
            unsafe fn write<const STREAM: bool>(destination: *mut u8, block: Block) {
                // SAFETY: guaranteed by the caller.
                unsafe { write_bytes::<$kind, STREAM>(destination, block) }
            }
        }
        impl Format<$vector> for $format {
            const ELEMENT_BYTES: usize = 1;
            const WRITES_ONE_NAN: bool = true;
            type Block = Block;
            type Wide = F32;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> Block {
                // SAFETY: the caller's pointer is good for one line.
                unsafe { $widen($read(source.cast())) }
            }
            stores!(Block);
            #[inline(always)]
            unsafe fn ordered(block: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                unsafe { ordered_quarters(block) }
            }
            #[inline(always)]
            unsafe fn shuffled(block: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                unsafe { shuffled_quarters(block) }
            }
        }
    };
}

/// The operations of one vector type. `min` and `max` return their second operand unless the first one compares
/// less or greater, so that ties and a NaN in `self` keep `self`; a blend then inserts a NaN of `other`.
macro_rules! lanes {
    ($t:ty, $lanes:literal, $element:ty, $nan:literal, $set1:ident, $add:ident, $mul:ident, $div:ident,
     $min:ident, $max:ident, $compare:ident, $blend:ident) => {
        impl Lanes for $t {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: u64) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $set1(value as $element) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $mul(self, other) }
            }
            #[inline(always)]
            unsafe fn divide(self, other: Self) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $div(self, other) }
            }
            #[inline(always)]
            unsafe fn minimum(self, other: Self) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $blend($min(other, self), other, $compare::<_CMP_UNORD_Q>(other, other)) }
            }
            #[inline(always)]
            unsafe fn maximum(self, other: Self) -> Self {
                // SAFETY: the caller has the instruction set.
                unsafe { $blend($max(other, self), other, $compare::<_CMP_UNORD_Q>(other, other)) }
            }
            #[inline(always)]
            unsafe fn canonical(self) -> Self {
                let nan = <$element>::from_bits($nan);
                // SAFETY: the caller has the instruction set.
                unsafe { $blend(self, $set1(nan), $compare::<_CMP_UNORD_Q>(self, self)) }
            }
        }
    };
}

/// Implements a format whose elements are whole lanes, in lines of `$line` bytes.
macro_rules! whole {
    ($format:ident, $lanes:ty, $bytes:literal, $line:literal, $load:ident, $bits:ident) => {
        impl $format {
            /// # Safety
            /// As for [`put`], for four lines.
            #[inline(always)]
            unsafe fn write<const STREAM: bool>(destination: *mut u8, [a, b, c, d]: [$lanes; 4]) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    put::<STREAM>(destination, $bits(a));
                    put::<STREAM>(destination.add($line), $bits(b));
                    put::<STREAM>(destination.add(2 * $line), $bits(c));
                    put::<STREAM>(destination.add(3 * $line), $bits(d));
                }
            }
        }
        impl Format<$lanes> for $format {
            const ELEMENT_BYTES: usize = $bytes;
            type Block = [$lanes; 4];
            type Wide = Self;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> [$lanes; 4] {
                // SAFETY: the caller's pointer is good for four lines.
                unsafe {
                    [
                        $load(source.cast()),
                        $load(source.add($line).cast()),
                        $load(source.add(2 * $line).cast()),
                        $load(source.add(3 * $line).cast()),
                    ]
                }
            }
            stores!([$lanes; 4]);
        }
    };
}

/// Implements `write` of a two-byte format with its `pack`.
macro_rules! packs {
    ($line:literal) => {
        /// # Safety
        /// As for [`put`], for two lines.
        #[inline(always)]
        unsafe fn write<const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                put::<STREAM>(destination, Self::pack(a, b));
                put::<STREAM>(destination.add($line), Self::pack(c, d));
            }
        }
    };
}

/// Implements bf16 with its `pack`. A line is loaded as its even and its odd elements.
macro_rules! bf16 {
    ($lanes:ty, $bits:ty, $line:literal) => {
        impl Bf16 {
            /// Adds the rounding increment, so that the upper half is the value rounded to nearest even (see the
            /// scalar code).
            ///
            /// # Safety
            /// The caller has the instruction set.
            #[inline(always)]
            unsafe fn round(lanes: $lanes) -> $bits {
                // SAFETY: the caller has the instruction set.
                unsafe {
                    let bits = castps_si(lanes);
                    let odd = and_si(srli_epi32::<16>(bits), set1_epi32(1));
                    add_epi32(bits, add_epi32(odd, set1_epi32(0x7FFF)))
                }
            }
            packs!($line);
        }
        impl Format<$lanes> for Bf16 {
            const ELEMENT_BYTES: usize = 2;
            type Block = Block;
            type Wide = F32;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> Block {
                // SAFETY: the caller's pointer is good for two lines.
                unsafe {
                    let upper = set1_epi32(0xFFFF_0000_u32 as i32);
                    let a = loadu_si(source.cast());
                    let b = loadu_si(source.add($line).cast());
                    [
                        castsi_ps(slli_epi32::<16>(a)),
                        castsi_ps(and_si(a, upper)),
                        castsi_ps(slli_epi32::<16>(b)),
                        castsi_ps(and_si(b, upper)),
                    ]
                }
            }
            stores!(Block);
            #[inline(always)]
            unsafe fn ordered([a, b, c, d]: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                let ([a, b], [c, d]) = unsafe { (interleave(a, b), interleave(c, d)) };
                [a, b, c, d]
            }
            #[inline(always)]
            unsafe fn shuffled([a, b, c, d]: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                let ([a, b], [c, d]) = unsafe { (separate(a, b), separate(c, d)) };
                [a, b, c, d]
            }
        }
    };
}

/// Implements binary16 with the processor's conversions, of half a line to a vector and back.
macro_rules! f16 {
    ($lanes:ty, $bits:ty, $line:literal, $read:ident, $widen:ident, $narrow:ident, $rounding:expr) => {
        impl F16 {
            /// # Safety
            /// The caller has the instruction set.
            #[inline(always)]
            unsafe fn pack(low: $lanes, high: $lanes) -> $bits {
                // SAFETY: the caller has the instruction set.
                unsafe { join($narrow::<{ $rounding }>(low), $narrow::<{ $rounding }>(high)) }
            }
            packs!($line);
        }
        impl Format<$lanes> for F16 {
            const ELEMENT_BYTES: usize = 2;
            type Block = Block;
            type Wide = F32;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> Block {
                // SAFETY: the caller's pointer is good for two lines.
                unsafe {
                    [
                        $widen($read(source.cast())),
                        $widen($read(source.add($line / 2).cast())),
                        $widen($read(source.add($line).cast())),
                        $widen($read(source.add(3 * $line / 2).cast())),
                    ]
                }
            }
            stores!(Block);
        }
    };
}
