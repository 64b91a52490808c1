"""Our recipe table: lines `<count> <item> = <count> <ingredient>, ...`; `#name` is a tag.

Families of one shape (eight woods, sixteen colours, tool materials) are written once and filled in.
Nothing here is read from another project; numbers follow the game where we know them and are
plain inventions of ours where that keeps the table free of cycles.
"""

WOODS = ("oak", "spruce", "birch", "jungle", "acacia", "dark oak", "mangrove", "cherry")
COLORS = (
    *("white", "orange", "magenta", "light blue", "yellow", "lime", "pink", "gray"),
    *("light gray", "cyan", "purple", "blue", "brown", "green", "red", "black"),
)
TOOL_MATERIALS = (
    ("wooden", "#planks"),
    ("stone", "cobblestone"),
    ("iron", "iron ingot"),
    ("golden", "gold ingot"),
    ("diamond", "diamond"),
)
ARMOR_MATERIALS = (
    ("leather", "leather"),
    ("iron", "iron ingot"),
    ("golden", "gold ingot"),
    ("diamond", "diamond"),
)

# A tag slot takes items of one kind out of these.
TAGS = {
    "planks": tuple(f"{wood} planks" for wood in WOODS),
    "wooden slab": tuple(f"{wood} slab" for wood in WOODS),
    "wool": tuple(f"{color} wool" for color in COLORS),
}

WOOD_FAMILY = """
4 {wood} planks = 1 {wood} log
6 {wood} slab = 3 {wood} planks
4 {wood} stairs = 6 {wood} planks
3 {wood} door = 6 {wood} planks
2 {wood} trapdoor = 6 {wood} planks
1 {wood} boat = 5 {wood} planks
1 {wood} button = 1 {wood} planks
1 {wood} pressure plate = 2 {wood} planks
3 {wood} fence = 4 {wood} planks, 2 stick
1 {wood} fence gate = 2 {wood} planks, 4 stick
3 {wood} sign = 6 {wood} planks, 1 stick
1 {wood} chest boat = 1 {wood} boat, 1 chest
"""

COLOR_FAMILY = """
3 {color} carpet = 2 {color} wool
1 {color} bed = 3 {color} wool, 3 #planks
1 {color} banner = 3 {color} wool, 1 stick
8 {color} stained glass = 8 glass, 1 {color} dye
16 {color} stained glass pane = 6 {color} stained glass
8 {color} concrete powder = 4 sand, 4 gravel, 1 {color} dye
8 {color} terracotta = 8 terracotta, 1 {color} dye
1 {color} candle = 1 candle, 1 {color} dye
"""

TOOL_FAMILY = """
1 {name} pickaxe = 3 {material}, 2 stick
1 {name} axe = 3 {material}, 2 stick
1 {name} shovel = 1 {material}, 2 stick
1 {name} hoe = 2 {material}, 2 stick
1 {name} sword = 2 {material}, 1 stick
"""

ARMOR_FAMILY = """
1 {name} helmet = 5 {material}
1 {name} chestplate = 8 {material}
1 {name} leggings = 7 {material}
1 {name} boots = 4 {material}
"""

DYES = """
1 white dye = 1 bone meal
1 yellow dye = 1 dandelion
1 red dye = 1 poppy
1 red dye = 1 beetroot
1 blue dye = 1 cornflower
1 blue dye = 1 lapis lazuli
1 black dye = 1 ink sac
1 brown dye = 1 cocoa beans
2 orange dye = 1 red dye, 1 yellow dye
2 pink dye = 1 red dye, 1 white dye
2 light blue dye = 1 blue dye, 1 white dye
2 purple dye = 1 red dye, 1 blue dye
2 gray dye = 1 black dye, 1 white dye
2 lime dye = 1 green dye, 1 white dye
2 cyan dye = 1 green dye, 1 blue dye
2 light gray dye = 1 gray dye, 1 white dye
2 magenta dye = 1 purple dye, 1 pink dye
3 bone meal = 1 bone
1 white wool = 4 string
"""

BUILDING = """
4 stick = 2 #planks
1 crafting table = 4 #planks
1 chest = 8 #planks
1 barrel = 6 #planks, 2 #wooden slab
1 bookshelf = 6 #planks, 3 book
1 lectern = 1 bookshelf, 4 #wooden slab
1 composter = 7 #wooden slab
1 loom = 2 string, 2 #planks
1 smithing table = 2 iron ingot, 4 #planks
1 fletching table = 2 flint, 4 #planks
1 cartography table = 2 paper, 4 #planks
1 grindstone = 2 stick, 1 stone slab, 2 #planks
1 stonecutter = 1 iron ingot, 3 stone
1 furnace = 8 cobblestone
1 blast furnace = 1 furnace, 5 iron ingot, 3 smooth stone
1 smoker = 1 furnace, 4 #planks
1 campfire = 3 stick, 1 coal, 3 #planks
1 soul campfire = 3 stick, 1 soul sand, 3 #planks
3 ladder = 7 stick
1 bowl = 3 #planks
1 stone slab = 1 stone
6 smooth stone slab = 3 smooth stone
4 stone bricks = 4 stone
6 stone brick slab = 3 stone bricks
4 stone brick stairs = 6 stone bricks
6 stone brick wall = 6 stone bricks
1 chiseled stone bricks = 2 stone brick slab
1 mossy stone bricks = 1 stone bricks, 1 vine
1 mossy cobblestone = 1 cobblestone, 1 vine
6 cobblestone wall = 6 cobblestone
1 cobblestone slab = 1 cobblestone
4 cobblestone stairs = 6 cobblestone
2 diorite = 2 cobblestone, 2 quartz
1 granite = 1 diorite, 1 quartz
2 andesite = 1 diorite, 1 cobblestone
4 polished andesite = 4 andesite
4 polished granite = 4 granite
4 polished diorite = 4 diorite
4 polished granite stairs = 6 polished granite
1 bricks = 4 brick
6 brick slab = 3 bricks
4 brick stairs = 6 bricks
6 brick wall = 6 bricks
1 flower pot = 3 brick
1 sandstone = 4 sand
4 cut sandstone = 4 sandstone
6 cut sandstone slab = 3 cut sandstone
1 chiseled sandstone = 2 sandstone
16 glass pane = 6 glass
3 glass bottle = 3 glass
16 iron bars = 6 iron ingot
1 iron door = 6 iron ingot
1 iron trapdoor = 4 iron ingot
9 iron nugget = 1 iron ingot
9 gold nugget = 1 gold ingot
1 chain = 1 iron ingot, 2 iron nugget
1 candle = 1 string, 1 honeycomb
1 clay = 4 clay ball
1 snow block = 4 snowball
6 snow = 3 snow block
1 hay bale = 9 wheat
1 scaffolding = 6 bamboo, 1 string
1 painting = 8 stick, 1 #wool
1 item frame = 8 stick, 1 leather
1 glow item frame = 1 item frame, 1 glow ink sac
1 armor stand = 6 stick, 1 smooth stone slab
1 beehive = 6 #planks, 3 honeycomb
1 honey block = 4 honey bottle
1 bell = 1 gold ingot, 2 stone slab, 2 stick
1 end rod = 1 blaze rod, 1 popped chorus fruit
1 ender chest = 8 obsidian, 1 eye of ender
1 beacon = 5 glass, 1 nether star, 3 obsidian
"""

MECHANISMS = """
4 torch = 1 coal, 1 stick
4 soul torch = 1 coal, 1 stick, 1 soul sand
1 lantern = 8 iron nugget, 1 torch
1 soul lantern = 8 iron nugget, 1 soul torch
1 jack o lantern = 1 carved pumpkin, 1 torch
1 redstone torch = 1 redstone, 1 stick
1 repeater = 2 redstone torch, 1 redstone, 3 stone
1 comparator = 3 redstone torch, 1 quartz, 3 stone
1 lever = 1 cobblestone, 1 stick
1 stone button = 1 stone
1 stone pressure plate = 2 stone
2 tripwire hook = 1 iron ingot, 1 stick, 1 #planks
1 trapped chest = 1 chest, 1 tripwire hook
1 piston = 3 #planks, 4 cobblestone, 1 iron ingot, 1 redstone
1 sticky piston = 1 piston, 1 slime ball
1 dropper = 7 cobblestone, 1 redstone
1 dispenser = 7 cobblestone, 1 bow, 1 redstone
1 observer = 6 cobblestone, 2 redstone, 1 quartz
1 hopper = 5 iron ingot, 1 chest
1 daylight detector = 3 glass, 3 quartz, 3 #wooden slab
1 note block = 8 #planks, 1 redstone
1 jukebox = 8 #planks, 1 diamond
1 target = 4 redstone, 1 hay bale
1 redstone lamp = 4 redstone, 1 glowstone
1 glowstone = 4 glowstone dust
1 tnt = 5 gunpowder, 4 sand
16 rail = 6 iron ingot, 1 stick
6 powered rail = 6 gold ingot, 1 stick, 1 redstone
6 detector rail = 6 iron ingot, 1 stone pressure plate, 1 redstone
6 activator rail = 6 iron ingot, 2 stick, 1 redstone torch
1 minecart = 5 iron ingot
1 chest minecart = 1 minecart, 1 chest
1 furnace minecart = 1 minecart, 1 furnace
1 hopper minecart = 1 minecart, 1 hopper
1 tnt minecart = 1 minecart, 1 tnt
1 lightning rod = 3 copper ingot
1 cauldron = 7 iron ingot
1 anvil = 9 iron ingot
1 brewing stand = 1 blaze rod, 3 cobblestone
1 enchanting table = 1 book, 2 diamond, 4 obsidian
"""

THINGS = """
1 bow = 3 stick, 3 string
1 crossbow = 3 stick, 1 iron ingot, 2 string, 1 tripwire hook
4 arrow = 1 flint, 1 stick, 1 feather
2 spectral arrow = 1 arrow, 4 glowstone dust
1 shield = 6 #planks, 1 iron ingot
1 fishing rod = 3 stick, 2 string
1 carrot on a stick = 1 fishing rod, 1 carrot
1 fungus on a stick = 1 fishing rod, 1 warped fungus
1 bucket = 3 iron ingot
1 shears = 2 iron ingot
1 flint and steel = 1 iron ingot, 1 flint
1 compass = 4 iron ingot, 1 redstone
1 clock = 4 gold ingot, 1 redstone
1 spyglass = 2 copper ingot, 1 amethyst shard
3 paper = 3 sugar cane
1 sugar = 1 sugar cane
1 book = 3 paper, 1 leather
1 writable book = 1 book, 1 ink sac, 1 feather
1 map = 8 paper, 1 compass
3 firework rocket = 1 paper, 1 gunpowder
1 lead = 4 string, 1 slime ball
1 leather horse armor = 7 leather
2 blaze powder = 1 blaze rod
1 eye of ender = 1 ender pearl, 1 blaze powder
1 fire charge = 1 blaze powder, 1 coal, 1 gunpowder
1 magma cream = 1 slime ball, 1 blaze powder
1 fermented spider eye = 1 spider eye, 1 brown mushroom, 1 sugar
1 glistering melon slice = 1 melon slice, 8 gold nugget
1 golden carrot = 1 carrot, 8 gold nugget
1 golden apple = 1 apple, 8 gold ingot
1 bread = 3 wheat
8 cookie = 2 wheat, 1 cocoa beans
1 cake = 3 milk bucket, 2 sugar, 1 egg, 3 wheat
1 pumpkin pie = 1 pumpkin, 1 sugar, 1 egg
1 mushroom stew = 1 bowl, 1 brown mushroom, 1 red mushroom
1 rabbit stew = 1 bowl, 1 cooked rabbit, 1 carrot, 1 baked potato
1 beetroot soup = 1 bowl, 6 beetroot
4 honey bottle = 4 glass bottle, 1 honeycomb
4 pumpkin seeds = 1 pumpkin
1 melon seeds = 1 melon slice
"""


def recipe_lines() -> list[str]:
    """Returns every recipe of the table as one line."""
    parts = [DYES, BUILDING, MECHANISMS, THINGS]
    parts += [WOOD_FAMILY.format(wood=wood) for wood in WOODS]
    parts += [COLOR_FAMILY.format(color=color) for color in COLORS]
    parts += [TOOL_FAMILY.format(name=n, material=m) for n, m in TOOL_MATERIALS]
    parts += [ARMOR_FAMILY.format(name=n, material=m) for n, m in ARMOR_MATERIALS]
    parts += [f"1 {c} wool = 1 white wool, 1 {c} dye" for c in COLORS if c != "white"]
    parts.append("1 green dye = 1 cactus")
    return [line for part in parts for line in part.splitlines() if line.strip()]
